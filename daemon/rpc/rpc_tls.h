/* Certificates in files: looked at before anybody relies on them.
 *
 * scripts/dev-certs makes such files for tests and development. Thread: any. */
#ifndef RS_RPC_RPC_TLS_H
#define RS_RPC_RPC_TLS_H

#include "base/err.h"

/* PEM files; the strings are borrowed for the call they are given to. */
struct rpc_tls_files {
    const char *ca;          /* whom we trust: one or more certificates; needed */
    const char *certificate; /* ours, with its chain; a server needs one, a client may have NULL */
    const char *key;         /* its private key, unencrypted; NULL where certificate is NULL */
};

/* What the files hold. */
struct rpc_tls_pems {
    char *ca;
    char *certificate; /* NULL: none */
    char *key;         /* NULL: none */
};

/* Reads and checks the files: they are there and readable, hold what they should, the certificate is
 * valid now, the key is the certificate's and is not open to everybody. RS_ENOTFOUND, RS_EPERM,
 * RS_EINVAL, RS_EPRECOND (expired, not yet valid); the text names the file and the remedy. *ret is
 * freed by rpc_tls_free. */
int rpc_tls_load(const struct rpc_tls_files *files, struct rpc_tls_pems *ret, struct err *e);
void rpc_tls_free(struct rpc_tls_pems *p); /* zeroes the key; safe to repeat */

#endif
