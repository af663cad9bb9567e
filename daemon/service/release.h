/* The release that --version and status name. */
#ifndef RS_SERVICE_RELEASE_H
#define RS_SERVICE_RELEASE_H

#define RESHARD_RELEASE "0.1.0"

#endif
