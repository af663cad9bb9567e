/* The commands of reshardctl that speak to a daemon. Each as cmd.h says. */
#ifndef RS_CLIENT_CMD_ONLINE_H
#define RS_CLIENT_CMD_ONLINE_H

struct json_t; /* jansson's */

int cmd_status(int argc, char **argv);
int cmd_versions(int argc, char **argv);
int cmd_watch(int argc, char **argv);
int cmd_submit(int argc, char **argv);
int cmd_abort(int argc, char **argv);
int cmd_evict(int argc, char **argv);
int cmd_drain(int argc, char **argv);
int cmd_timeline(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_doctor(int argc, char **argv); /* a daemon is welcome, not needed */

/* "landed 2.38 GB: network 1.19 GB (1.000 of the minimum), domain …" of a reshard.v1.Bytes. */
void cmd_print_bytes(const struct json_t *bytes);

#endif
