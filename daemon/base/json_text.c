#include "base/json_text.h"

#include <string.h>

#include "base/banned.h"

/* Length of the UTF-8 character at s (NUL-terminated), or 0 where there is none. */
static size_t utf8_length(const unsigned char *s)
{
    size_t n = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    if (n == 0 || s[0] > 0xF4)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xC0) != 0x80)
            return 0;
    bool bad = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) ||
               (s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F);
    return bad ? 0 : n;
}

/* True where the byte can stand in a JSON string as it is. */
static bool plain(unsigned char c)
{
    return c >= 0x20 && c < 0x7F && c != '"' && c != '\\';
}

void json_put_string(struct buf *b, const char *s)
{
    const unsigned char *p = (const unsigned char *)s;
    buf_put(b, "\"", 1);
    while (*p != '\0') {
        size_t n = 0;
        while (plain(p[n]))
            n++;
        buf_put(b, p, n);
        p += n;
        if (*p == '\0')
            break;
        if (*p == '"' || *p == '\\') {
            buf_put(b, (const char[]){'\\', (char)*p++}, 2);
        } else if (*p < 0x20 || *p == 0x7F) {
            buf_printf(b, "\\u%04x", *p++);
        } else if ((n = utf8_length(p)) > 0) {
            buf_put(b, p, n);
            p += n;
        } else {
            buf_put(b, "\xEF\xBF\xBD", 3);
            p++;
        }
    }
    buf_put(b, "\"", 1);
}

/* The byte after the string that begins at `at` (its opening quote), or n where it does not end. */
static size_t string_end(const char *text, size_t n, size_t at)
{
    for (at++; at < n && text[at] != '"'; at++)
        if (text[at] == '\\')
            at++;
    return at < n ? at + 1 : n;
}

int json_check_size(const char *text, size_t n_bytes, const char *what, size_t max_bytes,
                    size_t max_values, unsigned max_depth, struct err *e)
{
    size_t values = 1;
    unsigned depth = 0;
    if (n_bytes > max_bytes)
        return err_set(e, RS_EEXHAUSTED, "%s has %zu bytes; at most %zu are read", what, n_bytes,
                       max_bytes);
    for (size_t at = 0; at < n_bytes;) {
        char c = text[at];
        at = c == '"' ? string_end(text, n_bytes, at) : at + 1;
        values += c == ',' || c == '[' || c == '{';
        if ((c == '[' || c == '{') && ++depth > max_depth)
            return err_set(e, RS_EEXHAUSTED, "%s is nested deeper than %u", what, max_depth);
        depth -= (c == ']' || c == '}') && depth > 0;
    }
    if (values > max_values)
        return err_set(e, RS_EEXHAUSTED, "%s has more than %zu values", what, max_values);
    return 0;
}
