/* The commands of reshardctl, one function each, and what they share: exit codes, units, tables,
 * files.
 *
 * A command gets its own arguments (argv[0] is its name), prints results on stdout and reasons on
 * stderr, and returns an exit code. Thread: the main one. */
#ifndef RS_CLIENT_CMD_H
#define RS_CLIENT_CMD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"
#include "layout/layout.h"

enum cmd_exit {
    CMD_OK = 0,
    CMD_FAILED = 1, /* the operation failed */
    CMD_USAGE = 2,  /* bad usage or input */
    CMD_NO_DAEMON =
        3 /* nobody answers at the socket (a daemon that can't reach its coordinator does) */
};

/* Offline: layout check and layout show; plan. */
int cmd_layout(int argc, char **argv);
int cmd_plan(int argc, char **argv);

/* Whether the arguments ask for JSON: known before they are parsed, so that bad usage can be told
 * in JSON too. */
bool cmd_wants_json(int argc, char **argv);
/* Prints "reshardctl COMMAND: reason" on stderr, and with `json` {"ok": false, "error": reason} on
 * stdout, and gives the exit code for an error: CMD_USAGE where the caller's input is at fault, else
 * CMD_FAILED. */
int cmd_fail(const char *command, bool json, int code, const struct err *e);
/* The same for arguments, with a hint at --help; CMD_USAGE. */
int cmd_usage(const char *command, bool json, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Bad usage of getopt_long (opterr 0, options beginning with ':'), after it gave '?' or ':'. */
int cmd_bad_option(const char *command, bool json, int found, char **argv);
/* Flushes stdout: `code`, or CMD_FAILED and a reason where it could not all be written. */
int cmd_flush(const char *command, int code);

/* Decimal units: "12.6 MB", "999 B". Returns ret_text (24 bytes are enough). */
char *cmd_bytes_text(uint64_t bytes, char *ret_text, size_t capacity);
/* "1.28 ns", "340 us", "12.0 ms", "4.56 s", "2 min 03 s". */
char *cmd_duration_text(double seconds, char *ret_text, size_t capacity);

/* The first `most` characters of a UTF-8 text, and "…" where that is not all (4 * most + 4 bytes are
 * enough). */
char *cmd_cut_text(const char *text, unsigned most, char *ret_text, size_t capacity);

/* A decimal number within [least, greatest], nothing else beside it; false else. */
bool cmd_parse_u64(const char *text, uint64_t least, uint64_t greatest, uint64_t *ret);

/* The whole file ("-": stdin), the caller's to mem_free. RS_EINVAL names the path, RS_EEXHAUSTED
 * over max_bytes. */
int cmd_read_file(const char *path, size_t max_bytes, char **ret_text, size_t *ret_n,
                  struct err *e);
/* A layout file, parsed and checked; errors name the path. */
int cmd_read_layout(const char *path, struct layout **ret, struct err *e);

/* Columns that line up: cells are added row by row and printed at the end. Numbers go to the right.
 */
struct cmd_table {
    struct buf text; /* cells, NUL-terminated, one after another */
    size_t n_cells;
    unsigned n_columns;
    const char *align; /* per column 'l' or 'r' */
};
void cmd_table_init(struct cmd_table *t, const char *align);
void cmd_table_cell(struct cmd_table *t, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Prints with `indent` spaces before each row and two between columns; empties the table. */
int cmd_table_print(struct cmd_table *t, FILE *out, unsigned indent);

#endif
