/* reshardd: the daemon of one node. Open this file first.
 *
 * Two processes from one binary. The control process (daemon.c → service/) speaks gRPC, decides, remembers and plans;
 * it starts the data plane (`--data-plane FD` → exec/), which maps memory and moves bytes, and replaces it when it
 * dies. Reading order: this, refit/refit.h, service/service.h, plan/planner.h, test/sim. */
#include <getopt.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include "base/crash.h"
#include "base/log.h"
#include "daemon.h"
#include "exec/data_plane.h"
#include "service/config.h"
#include "service/release.h"

#include "base/banned.h"

static const char help[] =
    "usage: reshardd [--config FILE] [--node NAME] [--check-config] [--crash-points] [--version] "
    "[--help]\n"
    "\n"
    "  --config FILE    settings (config/reshardd.conf shows all); without it, the defaults\n"
    "  --node NAME      which of the settings' nodes this is; wins over [daemon] node\n"
    "  --check-config   check the settings, say the main ones as they come out, and exit\n"
    "  --crash-points   where RESHARD_CRASH=NAME[:N] makes it kill itself, for crash tests\n"
    "\n"
    "SIGTERM or SIGINT stops it. SIGHUP makes it read the certificates of [cluster] again, for "
    "new\n"
    "connections, and start a data plane that does not start now. Exit status: 0 stopped, 1 "
    "failed, 2 bad usage or settings.\n";

enum {
    OPTION_CONFIG = 1,
    OPTION_NODE,
    OPTION_CHECK,
    OPTION_CRASH_POINTS,
    OPTION_VERSION,
    OPTION_HELP,
    OPTION_DATA_PLANE
};

static const struct option options[] = {{"config", required_argument, NULL, OPTION_CONFIG},
                                        {"node", required_argument, NULL, OPTION_NODE},
                                        {"check-config", no_argument, NULL, OPTION_CHECK},
                                        {"crash-points", no_argument, NULL, OPTION_CRASH_POINTS},
                                        {"version", no_argument, NULL, OPTION_VERSION},
                                        {"help", no_argument, NULL, OPTION_HELP},
                                        {"data-plane", required_argument, NULL, OPTION_DATA_PLANE},
                                        {NULL, 0, NULL, 0}};

/* The control process starts it with exactly these: --data-plane FD LEVEL. */
static int run_data_plane(int argc, char **argv)
{
    char *end = NULL;
    enum log_level level;
    long fd = argc == 4 ? strtol(argv[2], &end, 10) : -1;
    if (fd < 3 || fd > 1 << 20 || *end != '\0' || log_level_parse(argv[3], &level) != 0) {
        (void)fprintf(stderr, "reshardd: --data-plane is for reshardd itself\n");
        return EXIT_USAGE;
    }
    /* The control process says when to stop (STOP, or its end); a signal to the whole group is for that one. */
    (void)signal(SIGINT, SIG_IGN);
    (void)signal(SIGTERM, SIG_IGN);
    (void)signal(SIGHUP, SIG_IGN); /* it has no certificates */
    (void)signal(SIGPIPE, SIG_IGN);
    /* It must not outlive the control process, least of all stopped: waking up later, it would finish the copy that it
     * was in the middle of, into memory that a newer attempt has written by then. If that process is dead already, the
     * socket says so. */
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    log_init(level, "data plane");
    const char *variable;
    (void)crash_init(&variable); /* checked by the control process */
    return data_plane_run((int)fd);
}

/* Blocks from here on go back to the system as soon as they are freed: layouts on their way in, bindings, a planner's
 * tables. Left alone, glibc raises the bound with each such block, up to 32 MiB, and keeps what lay below it. Of small
 * blocks as much is kept as one page of a layout takes: given back and faulted in again for each, that is a quarter of
 * what reading it costs. */
enum { LARGE_BLOCK_BYTES = 256 << 10, KEPT_BYTES = 8 << 20 };

static void give_memory_back(void)
{
    (void)mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES);
    (void)mallopt(M_TRIM_THRESHOLD, KEPT_BYTES);
}

/* Whether the ledger's folder is there or can be made: the daemon makes the last part of the path, not
 * those above it. What this user may write is not asked: another one may run it. */
static int state_dir_check(const struct config *c, struct err *e)
{
    char parent[CONFIG_MAX_PATH];
    struct stat st;
    if (stat(c->state_dir, &st) == 0)
        return S_ISDIR(st.st_mode)
                   ? 0
                   : err_set(e, RS_EINVAL, "state_dir %s is no folder; name one in [daemon]",
                             c->state_dir);
    (void)snprintf(parent, sizeof parent, "%s", c->state_dir);
    size_t n = strlen(parent);
    while (n > 1 && parent[n - 1] == '/')
        parent[--n] = '\0';
    char *slash = strrchr(parent, '/');
    if (slash == NULL)
        (void)snprintf(parent, sizeof parent, ".");
    else
        slash[slash == parent ? 1 : 0] = '\0';
    if (stat(parent, &st) == 0 && S_ISDIR(st.st_mode))
        return 0;
    return err_set(
        e, RS_EINVAL,
        "state_dir %s: there is no folder %s to make it in; make that one, or name another "
        "state_dir in [daemon]",
        c->state_dir, parent);
}

static int say_config(const struct config *c)
{
    (void)printf("settings are good: node %s, backend %s, devices %u in %u domain%s, socket %s, "
                 "state_dir %s\n",
                 c->node, c->backend, c->devices, c->n_domains, c->n_domains == 1 ? "" : "s",
                 c->socket, c->state_dir);
    if (c->n_nodes > 0)
        (void)printf("cluster: %u nodes, coordinator %s at %s, this one at %s, data at %s, %s\n",
                     c->n_nodes, c->coordinator, c->nodes[c->coordinator_index].address,
                     c->nodes[c->me].address, c->data_address,
                     c->tls_ca[0] != '\0'  ? "TLS both ways"
                     : c->insecure_network ? "WITHOUT TLS (insecure_network)"
                                           : "without TLS, on loopback");
    return EXIT_STOPPED;
}

static int settings_read(struct config *c, const char *path, const char *node, struct err *e)
{
    int r = node != NULL ? config_set_node(c, node, e) : 0;
    if (r == 0)
        r = path != NULL ? config_read(c, path, e) : config_check(c, e);
    if (r == 0 && (r = config_check_here(c, e)) != 0 && path != NULL)
        (void)err_prefix(e, r, "%s", path);
    return r == 0 ? state_dir_check(c, e) : r;
}

static int serve(const struct config *c)
{
    log_init(c->log_level, "reshardd");
    if (c->insecure_network && c->tls_ca[0] == '\0' && c->n_nodes > 0)
        log_warn("INSECURE: insecure_network = yes and no tls_ca: who reaches %s can act as a node "
                 "and read and change weights",
                 c->nodes[c->me].address);
    return daemon_run(c);
}

int main(int argc, char **argv)
{
    const char *path = NULL, *node = NULL, *variable;
    bool check = false;
    struct config config;
    struct err e = {0};
    give_memory_back();
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (o) {
        case OPTION_CONFIG:
            path = optarg;
            break;
        case OPTION_NODE:
            node = optarg;
            break;
        case OPTION_CHECK:
            check = true;
            break;
        case OPTION_CRASH_POINTS:
            crash_print();
            return EXIT_STOPPED;
        case OPTION_VERSION:
            (void)printf("reshardd %s\n", RESHARD_RELEASE);
            return EXIT_STOPPED;
        case OPTION_HELP:
            (void)fputs(help, stdout);
            return EXIT_STOPPED;
        case OPTION_DATA_PLANE:
            return run_data_plane(argc, argv);
        default:
            (void)fputs(help, stderr);
            return EXIT_USAGE;
        }
    }
    if (optind < argc) {
        (void)fprintf(stderr, "reshardd: '%s' is not understood\n%s", argv[optind], help);
        return EXIT_USAGE;
    }
    if (crash_init(&variable) != 0) {
        (void)fprintf(stderr, "reshardd: %s names no point of base/crash.h (--crash-points)\n",
                      variable);
        return EXIT_USAGE;
    }
    config_init(&config);
    int r = settings_read(&config, path, node, &e);
    if (r != 0)
        (void)fprintf(stderr, "reshardd: %s\n", err_text(&e, r));
    int code = r != 0 ? EXIT_USAGE : check ? say_config(&config) : serve(&config);
    config_close(&config);
    return code;
}
