/* Error codes, their classes, and the text that reaches a person.
 *
 * A function that can fail returns 0 or a negative RS_E code. Where a person will read the reason,
 * its last parameter is `struct err *` (may be NULL): the lowest level sets it, each level above
 * prefixes what it was doing. errno, libuv, CUDA, NCCL, SQLite and gRPC codes are translated in the
 * file that made the call. Thread: any; an err belongs to its caller. */
#ifndef RS_BASE_ERR_H
#define RS_BASE_ERR_H

#include <stddef.h>

/* What to do about an error. */
enum err_class {
    ERR_CALLER, /* fix the request */
    ERR_RETRY,  /* the same request may succeed later */
    ERR_PEER,   /* rebuild the link to a peer */
    ERR_DEVICE, /* rebuild the device context */
    ERR_DISK,   /* stop: the ledger is unsafe */
    ERR_BUG     /* ours */
};

/* X(name, value, class, gRPC status, text). The gRPC numbers are the public status codes; they
 * stand here so that there is one list, not so that anyone below rpc/ may know gRPC. */
#define RS_ERRORS(X)                                                                               \
    X(RS_EINVAL, -1, ERR_CALLER, 3, "invalid argument")                                            \
    X(RS_ENOTFOUND, -2, ERR_CALLER, 5, "not found")                                                \
    X(RS_EEXIST, -3, ERR_CALLER, 6, "already exists")                                              \
    X(RS_EPRECOND, -4, ERR_CALLER, 9, "failed precondition")                                       \
    X(RS_EPERM, -5, ERR_CALLER, 7, "permission denied")                                            \
    X(RS_EUNAUTH, -6, ERR_CALLER, 16, "unauthenticated")                                           \
    X(RS_EUNIMPL, -7, ERR_CALLER, 12, "unimplemented")                                             \
    X(RS_EEXHAUSTED, -8, ERR_RETRY, 8, "resource exhausted")                                       \
    X(RS_ENOMEM, -9, ERR_RETRY, 8, "out of memory")                                                \
    X(RS_EABORTED, -10, ERR_RETRY, 10, "aborted")                                                  \
    X(RS_EDEADLINE, -11, ERR_RETRY, 4, "deadline exceeded")                                        \
    X(RS_ECANCELED, -12, ERR_RETRY, 1, "cancelled")                                                \
    X(RS_EUNAVAIL, -13, ERR_RETRY, 14, "unavailable")                                              \
    X(RS_EPEER, -14, ERR_PEER, 14, "peer failed")                                                  \
    X(RS_EPROTO, -15, ERR_PEER, 3, "malformed message")                                            \
    X(RS_EDEVICE, -16, ERR_DEVICE, 13, "device failed")                                            \
    X(RS_EDISK, -17, ERR_DISK, 13, "ledger failed")                                                \
    X(RS_EFULL, -18, ERR_DISK, 8, "ledger disk full")                                              \
    X(RS_EDATALOSS, -19, ERR_PEER, 15, "content differs")                                          \
    X(RS_EIO, -20, ERR_RETRY, 13, "input/output error")                                            \
    X(RS_EINTERNAL, -21, ERR_BUG, 13, "internal error")

enum rs_error {
#define X(name, value, class, status, text) name = (value),
    RS_ERRORS(X)
#undef X
};

#define ERR_TEXT_BYTES 1024

struct err {
    int code;                  /* 0 or RS_E… */
    char text[ERR_TEXT_BYTES]; /* one line, no final newline; truncated at whole UTF-8 characters */
};

/* The list's text for `code`; "ok" for 0. Never NULL. */
const char *err_name(int code);
enum err_class err_class(int code);
/* The gRPC status number for `code`; 0 for 0. */
int err_status(int code);
/* The code for a gRPC status number: the first of the list that has it; RS_EINTERNAL if none. */
int err_from_status(int status);
/* The code for an errno value. */
int err_from_errno(int errno_value);

/* Sets code and text, returns `code`, so that `return err_set(e, RS_EINVAL, "…")` reads well. */
int err_set(struct err *e, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Puts "what: " before the text, unless that stands there already (another process may have put it); returns `code`. Sets
 * the text to the code's name if it was empty. */
int err_prefix(struct err *e, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The text, or the code's name where nothing was set. */
const char *err_text(const struct err *e, int code);

/* A bug: prints file, line and condition to stderr and aborts. On in release. */
#define rs_assert(cond) ((cond) ? (void)0 : err_assert_failed(__FILE__, __LINE__, __func__, #cond))
_Noreturn void err_assert_failed(const char *file, int line, const char *func, const char *cond);

#endif
