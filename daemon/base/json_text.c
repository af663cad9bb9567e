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
