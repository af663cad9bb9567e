#include "rpc/rpc_tls.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include "base/mem.h"

#include "base/banned.h"

/* Bundles of authorities are the largest; the system's own has 220 kB. */
#define MAX_FILE_BYTES (1U << 20)

/* --- reading ---------------------------------------------------------------------------------- */

static int fail(struct err *e, const char *what, const char *path)
{
    int saved = errno;
    if (saved == ENOENT || saved == ENOTDIR)
        return err_set(
            e, RS_ENOTFOUND,
            "%s '%s' is not there: check the path; scripts/dev-certs makes one for tests", what,
            path);
    if (saved == EACCES || saved == EPERM)
        return err_set(e, RS_EPERM, "%s '%s': %s: let the daemon's user read it", what, path,
                       strerror(saved));
    return err_set(e, err_from_errno(saved), "%s '%s': %s", what, path, strerror(saved));
}

static int read_all(int fd, size_t size, char *ret)
{
    size_t n = 0;
    while (n < size) {
        ssize_t got = read(fd, ret + n, size - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -1;
        n += (size_t)got;
    }
    ret[n] = '\0';
    return 0;
}

static int read_open(int fd, const char *what, const char *path, bool secret, char **ret,
                     struct err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return fail(e, what, path);
    if (!S_ISREG(st.st_mode) || st.st_size == 0 || st.st_size > (off_t)MAX_FILE_BYTES)
        return err_set(e, RS_EINVAL, "%s '%s' is no PEM file: a file of 1 byte to 1 MiB is needed",
                       what, path);
    if (secret && (st.st_mode & (S_IRWXO | S_IWGRP)) != 0)
        return err_set(e, RS_EPERM,
                       "%s '%s' is open to others (mode %03o): chmod 600 it, and make a new one "
                       "where others could have read it",
                       what, path, (unsigned)st.st_mode & 0777U);
    char *text = mem_alloc((size_t)st.st_size + 1);
    if (text == NULL)
        return err_set(e, RS_ENOMEM, "no memory for %s '%s'", what, path);
    errno = EIO;
    if (read_all(fd, (size_t)st.st_size, text) != 0) {
        int r = fail(e, what, path);
        OPENSSL_cleanse(text, (size_t)st.st_size);
        mem_free(text);
        return r;
    }
    *ret = text;
    return 0;
}

static int read_file(const char *what, const char *path, bool secret, char **ret, struct err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return fail(e, what, path);
    int r = read_open(fd, what, path, secret, ret, e);
    (void)close(fd);
    return r;
}

/* --- looking ---------------------------------------------------------------------------------- */

static BIO *bio_of(const char *text)
{
    return BIO_new_mem_buf(text, (int)strlen(text));
}

/* Never asks a terminal. */
static int no_passphrase(char *buffer, int size, int rwflag, void *arg)
{
    (void)buffer, (void)size, (void)rwflag, (void)arg;
    return -1;
}

static X509 *next_certificate(BIO *bio)
{
    return bio == NULL ? NULL : PEM_read_bio_X509(bio, NULL, no_passphrase, NULL);
}

/* "Jan  1 00:00:00 2030 GMT" */
static void time_text(const ASN1_TIME *t, char *ret, size_t size)
{
    BIO *bio = BIO_new(BIO_s_mem());
    int n = 0;
    if (bio != NULL && ASN1_TIME_print(bio, t) == 1)
        n = BIO_read(bio, ret, (int)size - 1);
    ret[n > 0 ? n : 0] = '\0';
    (void)BIO_free(bio);
}

static int check_dates(const X509 *x, const char *what, const char *path, struct err *e)
{
    char when[64];
    if (X509_cmp_current_time(X509_get0_notBefore(x)) >= 0) {
        time_text(X509_get0_notBefore(x), when, sizeof when);
        return err_set(e, RS_EPRECOND, "%s '%s' is not valid before %s: check this machine's clock",
                       what, path, when);
    }
    if (X509_cmp_current_time(X509_get0_notAfter(x)) <= 0) {
        time_text(X509_get0_notAfter(x), when, sizeof when);
        return err_set(e, RS_EPRECOND, "%s '%s' expired at %s: put a new one there", what, path,
                       when);
    }
    return 0;
}

/* At least one certificate. An authority that has expired among others is no fault: it trusts nobody
 * any more; one alone is. */
static int check_ca(const char *pem, const char *path, struct err *e)
{
    BIO *bio = bio_of(pem);
    unsigned n = 0, n_valid = 0;
    int r = 0;
    for (X509 *x = next_certificate(bio); x != NULL; x = next_certificate(bio)) {
        n++;
        n_valid += check_dates(x, "authority", path, e) == 0;
        X509_free(x);
    }
    if (n == 0)
        r = err_set(e, RS_EINVAL, "authority '%s' holds no certificate in PEM form", path);
    else if (n_valid == 0)
        r = RS_EPRECOND; /* the last one's text stands */
    (void)BIO_free(bio);
    return r;
}

static int check_key(X509 *x, const struct rpc_tls_files *files, const char *pem, struct err *e)
{
    BIO *bio = bio_of(pem);
    EVP_PKEY *key = bio == NULL ? NULL : PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL);
    int r = 0;
    if (key == NULL)
        r = err_set(e, RS_EINVAL,
                    "key '%s' holds no private key in PEM form that can be read without passphrase",
                    files->key);
    else if (X509_check_private_key(x, key) != 1)
        r = err_set(e, RS_EINVAL, "key '%s' does not belong to certificate '%s': put its own there",
                    files->key, files->certificate);
    EVP_PKEY_free(key);
    (void)BIO_free(bio);
    return r;
}

static int check_pair(const struct rpc_tls_files *files, const struct rpc_tls_pems *p,
                      struct err *e)
{
    BIO *bio = bio_of(p->certificate);
    X509 *x = next_certificate(bio); /* the first is ours, its chain follows */
    int r;
    if (x == NULL)
        r = err_set(e, RS_EINVAL, "certificate '%s' holds no certificate in PEM form",
                    files->certificate);
    else
        r = check_dates(x, "certificate", files->certificate, e);
    if (r == 0)
        r = check_key(x, files, p->key, e);
    X509_free(x);
    (void)BIO_free(bio);
    return r;
}

static int load(const struct rpc_tls_files *files, struct rpc_tls_pems *p, struct err *e)
{
    int r = read_file("authority", files->ca, false, &p->ca, e);
    if (r == 0)
        r = check_ca(p->ca, files->ca, e);
    if (r != 0 || files->certificate == NULL)
        return r;
    r = read_file("certificate", files->certificate, false, &p->certificate, e);
    if (r == 0)
        r = read_file("key", files->key, true, &p->key, e);
    return r != 0 ? r : check_pair(files, p, e);
}

int rpc_tls_load(const struct rpc_tls_files *files, struct rpc_tls_pems *ret, struct err *e)
{
    struct rpc_tls_pems p = {0};
    if (files->ca == NULL)
        return err_set(e, RS_EINVAL, "TLS needs the file of an authority to trust");
    if ((files->certificate == NULL) != (files->key == NULL))
        return err_set(e, RS_EINVAL, "TLS needs certificate and key together: '%s' is alone",
                       files->certificate != NULL ? files->certificate : files->key);
    int r = load(files, &p, e);
    ERR_clear_error();
    if (r != 0) {
        rpc_tls_free(&p);
        return err_prefix(e, r, "TLS");
    }
    *ret = p;
    return 0;
}

void rpc_tls_free(struct rpc_tls_pems *p)
{
    if (p->key != NULL)
        OPENSSL_cleanse(p->key, strlen(p->key));
    mem_free(p->ca);
    mem_free(p->certificate);
    mem_free(p->key);
    *p = (struct rpc_tls_pems){0};
}
