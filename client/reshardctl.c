/* reshardctl: the operator's tool. Finds the command; the rest is in cmd_*.c. */
#include <stdio.h>
#include <string.h>

#include "client/cmd.h"
#include "client/cmd_online.h"
#include "service/release.h"

#include "base/banned.h"

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *what;
} commands[] = {
    {"status", cmd_status, "models, versions in flight, instances, workers"},
    {"versions", cmd_versions, "what became of a model's versions"},
    {"watch", cmd_watch, "progress of a refit, live"},
    {"submit", cmd_submit, "ask for a refit of a version"},
    {"abort", cmd_abort, "end what is in flight"},
    {"evict", cmd_evict, "end a worker's lease"},
    {"drain", cmd_drain, "take a node out of use, or back in"},
    {"timeline", cmd_timeline, "time marks of versions; Chrome trace"},
    {"serve", cmd_serve, "a page and metrics over HTTP"},
    {"doctor", cmd_doctor, "what this machine has for reshardd, and what to do"},
    {"layout", cmd_layout, "check or show a layout file (offline)"},
    {"plan", cmd_plan, "plan a refit from files (offline)"},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void help(FILE *out)
{
    (void)fprintf(out, "usage: reshardctl COMMAND [ARGUMENTS]\n\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        (void)fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].what);
    (void)fprintf(out,
                  "\nreshardctl COMMAND --help tells more. All take --json, which tells errors\n"
                  "in JSON too: {\"ok\": false, \"error\": \"…\"}. --version: this release.\n"
                  "Where MODEL is left out: the only one there is (status: all).\n"
                  "Exit: 0 ok, 1 the operation failed, 2 bad usage or input, 3 no daemon.\n");
}

static const struct command *find(const char *name)
{
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

/* "reshardctl help COMMAND" is "reshardctl COMMAND --help". */
static int help_of(char *name)
{
    const struct command *c = find(name);
    if (c == NULL) {
        (void)fprintf(stderr, "reshardctl: there is no command '%s'\n", name);
        return CMD_USAGE;
    }
    char option[] = "--help";
    char *argv[] = {name, option, NULL};
    return c->run(2, argv);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        help(stderr);
        return CMD_USAGE;
    }
    if (strcmp(argv[1], "help") == 0 && argc > 2)
        return help_of(argv[2]);
    if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0 ||
        strcmp(argv[1], "-h") == 0) {
        help(stdout);
        return cmd_flush("help", CMD_OK);
    }
    if (strcmp(argv[1], "--version") == 0) {
        (void)printf("reshardctl %s\n", RESHARD_RELEASE);
        return cmd_flush("--version", CMD_OK);
    }
    const struct command *c = find(argv[1]);
    if (c == NULL) {
        (void)fprintf(stderr,
                      "reshardctl: there is no command '%s' (reshardctl --help tells which)\n",
                      argv[1]);
        return CMD_USAGE;
    }
    return c->run(argc - 1, argv + 1);
}
