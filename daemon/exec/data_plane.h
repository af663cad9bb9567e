/* The data plane process: devices, mapped memory, transport, execution. */
#ifndef RS_EXEC_DATA_PLANE_H
#define RS_EXEC_DATA_PLANE_H

/* Runs the data plane on the control socket (wire.h) until STOP or its end; returns the exit
 * status. Called by main for `reshardd --data-plane FD`. Its one loop thread owns all state; device
 * threads give completions back through a mailbox and an eventfd. */
int data_plane_run(int control_socket);

#endif
