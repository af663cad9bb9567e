/* Functions that nobody calls here: each becomes a compile error. Include last in every .c file. */
#ifndef RS_BASE_BANNED_H
#define RS_BASE_BANNED_H

#undef alloca
#pragma GCC poison strcpy strcat sprintf vsprintf strtok gets atoi atol atoll alloca
#pragma GCC poison sleep usleep nanosleep

#endif
