#include "client/cmd.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "base/mem.h"

#include "base/banned.h"

bool cmd_wants_json(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--json") == 0)
            return true;
    return false;
}

/* The reason for a program; stderr has it for a person. */
static void print_json_error(const char *text)
{
    struct buf b;
    buf_init(&b);
    buf_printf(&b, "{\"ok\": false, \"error\": ");
    json_put_string(&b, text);
    if (buf_error(&b) == 0)
        (void)printf("%.*s}\n", (int)b.n_bytes, (const char *)b.data);
    (void)fflush(stdout);
    buf_close(&b);
}

int cmd_fail(const char *command, bool json, int code, const struct err *e)
{
    (void)fflush(stdout);
    (void)fprintf(stderr, "reshardctl %s: %s\n", command, err_text(e, code));
    if (json)
        print_json_error(err_text(e, code));
    return err_class(code) == ERR_CALLER || code == RS_EEXHAUSTED ? CMD_USAGE : CMD_FAILED;
}

int cmd_usage(const char *command, bool json, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    (void)fprintf(stderr, "reshardctl %s: %s (reshardctl %s --help tells more)\n", command, text,
                  command);
    if (json)
        print_json_error(text);
    return CMD_USAGE;
}

int cmd_bad_option(const char *command, bool json, int found, char **argv)
{
    return cmd_usage(command, json,
                     found == ':' ? "option '%s' needs a value" : "there is no option '%s'",
                     argv[optind - 1]);
}

int cmd_flush(const char *command, int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    (void)fprintf(stderr, "reshardctl %s: can't write the output: %s\n", command, strerror(errno));
    return CMD_FAILED;
}

/* Three digits always, so that a column of them lines up: "1.20", "12.0", "120". */
static char *three_digits(double v, const char *unit, char *ret_text, size_t capacity)
{
    (void)snprintf(ret_text, capacity, "%.*f %s", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v, unit);
    return ret_text;
}

char *cmd_bytes_text(uint64_t bytes, char *ret_text, size_t capacity)
{
    static const char *const units[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
    if (bytes < 1000) {
        (void)snprintf(ret_text, capacity, "%" PRIu64 " B", bytes);
        return ret_text;
    }
    double v = (double)bytes / 1000;
    size_t unit = 0;
    for (; v >= 999.5 && unit + 1 < sizeof units / sizeof *units; unit++)
        v /= 1000;
    return three_digits(v, units[unit], ret_text, capacity);
}

char *cmd_duration_text(double seconds, char *ret_text, size_t capacity)
{
    if (seconds < 1e-6)
        (void)snprintf(ret_text, capacity, "%.3g ns", seconds * 1e9);
    else if (seconds < 0.9995e-3)
        (void)snprintf(ret_text, capacity, "%.0f us", seconds * 1e6);
    else if (seconds < 0.9995)
        (void)three_digits(seconds * 1e3, "ms", ret_text, capacity);
    else if (seconds < 59.95)
        (void)three_digits(seconds, "s", ret_text, capacity);
    else
        (void)snprintf(ret_text, capacity, "%.0f min %02.0f s",
                       (double)((long long)(seconds + 0.5) / 60),
                       (double)((long long)(seconds + 0.5) % 60));
    return ret_text;
}

char *cmd_cut_text(const char *text, unsigned most, char *ret_text, size_t capacity)
{
    size_t n = 0;
    unsigned characters = 0;
    for (; text[n] != '\0'; n++)
        if (((unsigned char)text[n] & 0xC0) != 0x80 && characters++ == most)
            break;
    (void)snprintf(ret_text, capacity, "%.*s%s", (int)n, text, text[n] != '\0' ? "…" : "");
    return ret_text;
}

bool cmd_parse_u64(const char *text, uint64_t least, uint64_t greatest, uint64_t *ret)
{
    char *end;
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || text[digits] != '\0')
        return false;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno != 0 || v < least || v > greatest)
        return false;
    *ret = v;
    return true;
}

static int read_stream(FILE *f, const char *path, size_t max_bytes, struct buf *b, struct err *e)
{
    char chunk[1 << 16];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0) {
        if (n > max_bytes - b->n_bytes)
            return err_set(e, RS_EEXHAUSTED, "%s: larger than %zu bytes", path, max_bytes);
        buf_put(b, chunk, n);
        if (buf_error(b) != 0)
            return err_set(e, RS_ENOMEM, "%s: out of memory", path);
    }
    if (ferror(f))
        return err_set(e, RS_EINVAL, "can't read %s: %s", path, strerror(errno));
    return 0;
}

int cmd_read_file(const char *path, size_t max_bytes, char **ret_text, size_t *ret_n, struct err *e)
{
    bool standard = strcmp(path, "-") == 0;
    FILE *f = standard ? stdin : fopen(path, "re");
    if (f == NULL)
        return err_set(e, RS_EINVAL, "can't open %s: %s", path, strerror(errno));
    struct buf b;
    buf_init(&b);
    int r = read_stream(f, path, max_bytes, &b, e);
    if (!standard)
        (void)fclose(f);
    char *text = r == 0 ? (char *)buf_steal(&b, ret_n) : NULL;
    buf_close(&b);
    if (r == 0 && text == NULL)
        return err_set(e, RS_ENOMEM, "%s: out of memory", path);
    if (r == 0)
        *ret_text = text;
    return r;
}

int cmd_read_layout(const char *path, struct layout **ret, struct err *e)
{
    char *text;
    size_t n;
    int r = cmd_read_file(path, LAYOUT_MAX_JSON_BYTES, &text, &n, e);
    if (r != 0)
        return r;
    r = layout_from_json(text, n, ret, e);
    mem_free(text);
    return r == 0 ? 0 : err_prefix(e, r, "%s", path);
}

void cmd_table_init(struct cmd_table *t, const char *align)
{
    *t = (struct cmd_table){.n_columns = (unsigned)strlen(align), .align = align};
    buf_init(&t->text);
}

void cmd_table_cell(struct cmd_table *t, const char *format, ...)
{
    char cell[1024];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(cell, sizeof cell, format, args);
    va_end(args);
    buf_put(&t->text, cell, strlen(cell) + 1);
    t->n_cells++;
}

/* Characters, not bytes, of a UTF-8 text. */
static unsigned text_width(const char *s)
{
    unsigned n = 0;
    for (; *s != '\0'; s++)
        n += ((unsigned char)*s & 0xC0) != 0x80;
    return n;
}

enum { TABLE_MAX_COLUMNS = 16 };

static void print_cell(const struct cmd_table *t, unsigned column, const char *s, unsigned width,
                       FILE *out)
{
    unsigned pad = width - text_width(s);
    bool last = column + 1 == t->n_columns;
    if (t->align[column] == 'r')
        (void)fprintf(out, "%*s%s", (int)pad, "", s);
    else
        (void)fprintf(out, "%s%*s", s, last ? 0 : (int)pad, "");
    (void)fputs(last ? "\n" : "  ", out);
}

int cmd_table_print(struct cmd_table *t, FILE *out, unsigned indent)
{
    unsigned width[TABLE_MAX_COLUMNS] = {0};
    int r = buf_error(&t->text);
    rs_assert(t->n_columns <= TABLE_MAX_COLUMNS);
    const char *s = (const char *)t->text.data;
    for (size_t i = 0; r == 0 && i < t->n_cells; i++, s += strlen(s) + 1)
        if (text_width(s) > width[i % t->n_columns])
            width[i % t->n_columns] = text_width(s);
    s = (const char *)t->text.data;
    for (size_t i = 0; r == 0 && i < t->n_cells; i++, s += strlen(s) + 1) {
        unsigned column = (unsigned)(i % t->n_columns);
        if (column == 0)
            (void)fprintf(out, "%*s", (int)indent, "");
        print_cell(t, column, s, width[column], out);
    }
    buf_close(&t->text);
    t->n_cells = 0;
    return r;
}
