/* Certificates of every kind, good and bad, made in a folder of the test's own. Header only; OpenSSL. */
#ifndef RS_TEST_CERTS_H
#define RS_TEST_CERTS_H

#include <check.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include "rpc/rpc_tls.h"

struct authority {
    EVP_PKEY *key;
    X509 *certificate;
};

struct certs {
    char directory[64];
    struct authority ours, foreign;
};

/* What a certificate says; times in seconds from now. */
struct cert {
    const char *name; /* of the files, and the common name unless cn is given */
    const char *cn;
    const char *san; /* OpenSSL's words, "DNS:n0,IP:127.0.0.1"; NULL: none */
    long from_s, until_s;
    bool foreign; /* of an authority that nobody trusts */
};

struct cert_files {
    char ca[96], certificate[96], key[96];
    struct rpc_tls_files files;
};

static inline void add_extension(X509 *x, int nid, const char *value)
{
    X509V3_CTX ctx;
    X509V3_set_ctx_nodb(&ctx);
    X509V3_set_ctx(&ctx, x, x, NULL, NULL, 0);
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, &ctx, nid, value);
    ck_assert_ptr_nonnull(extension);
    ck_assert_int_eq(X509_add_ext(x, extension, -1), 1);
    X509_EXTENSION_free(extension);
}

static inline X509 *new_certificate(EVP_PKEY *key, const char *cn, long from_s, long until_s)
{
    static long serial = 1000;
    X509 *x = X509_new();
    X509_NAME *name = X509_get_subject_name(x);
    ck_assert_int_eq(X509_set_version(x, 2), 1);
    ck_assert_int_eq(ASN1_INTEGER_set(X509_get_serialNumber(x), ++serial), 1);
    ck_assert_ptr_nonnull(X509_gmtime_adj(X509_getm_notBefore(x), from_s));
    ck_assert_ptr_nonnull(X509_gmtime_adj(X509_getm_notAfter(x), until_s));
    ck_assert_int_eq(
        X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const unsigned char *)cn, -1, -1, 0),
        1);
    ck_assert_int_eq(X509_set_pubkey(x, key), 1);
    return x;
}

static inline struct authority new_authority(const char *cn)
{
    struct authority a = {.key = EVP_EC_gen("P-256")};
    a.certificate = new_certificate(a.key, cn, -3600, 86400);
    ck_assert_int_eq(X509_set_issuer_name(a.certificate, X509_get_subject_name(a.certificate)), 1);
    add_extension(a.certificate, NID_basic_constraints, "critical,CA:TRUE");
    add_extension(a.certificate, NID_key_usage, "critical,keyCertSign");
    ck_assert_int_gt(X509_sign(a.certificate, a.key, EVP_sha256()), 0);
    return a;
}

static inline void cert_path(const struct certs *c, const char *file, const char *ending,
                             char ret[96])
{
    (void)snprintf(ret, 96, "%s/%s%s", c->directory, file, ending);
}

static inline void write_certificate(const char *path, X509 *x)
{
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(PEM_write_X509(f, x), 1);
    ck_assert_int_eq(fclose(f), 0);
}

static inline void write_key(const char *path, EVP_PKEY *key, const EVP_CIPHER *cipher)
{
    char passphrase[] = "secret";
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fchmod(fileno(f), 0600), 0);
    ck_assert_int_eq(
        PEM_write_PrivateKey(f, key, cipher, NULL, 0, NULL, cipher == NULL ? NULL : passphrase), 1);
    ck_assert_int_eq(fclose(f), 0);
}

static inline void certs_open(struct certs *c)
{
    char path[96];
    (void)snprintf(c->directory, sizeof c->directory, "/tmp/rs-certs-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(c->directory));
    c->ours = new_authority("our authority");
    c->foreign = new_authority("a foreign authority");
    cert_path(c, "ca", ".pem", path);
    write_certificate(path, c->ours.certificate);
    cert_path(c, "foreign-ca", ".pem", path);
    write_certificate(path, c->foreign.certificate);
}

/* DIRECTORY/NAME.pem and .key, and their paths with those of our authority. */
static inline void certs_make(struct certs *c, const struct cert *spec, struct cert_files *ret)
{
    const struct authority *by = spec->foreign ? &c->foreign : &c->ours;
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *x = new_certificate(key, spec->cn == NULL ? spec->name : spec->cn, spec->from_s,
                              spec->until_s == 0 ? 3600 : spec->until_s);
    ck_assert_int_eq(X509_set_issuer_name(x, X509_get_subject_name(by->certificate)), 1);
    if (spec->san != NULL)
        add_extension(x, NID_subject_alt_name, spec->san);
    ck_assert_int_gt(X509_sign(x, by->key, EVP_sha256()), 0);
    cert_path(c, "ca", ".pem", ret->ca);
    cert_path(c, spec->name, ".pem", ret->certificate);
    cert_path(c, spec->name, ".key", ret->key);
    ret->files =
        (struct rpc_tls_files){.ca = ret->ca, .certificate = ret->certificate, .key = ret->key};
    write_certificate(ret->certificate, x);
    write_key(ret->key, key, NULL);
    X509_free(x);
    EVP_PKEY_free(key);
}

/* One that is good for a server at loopback and for a client. */
static inline void certs_make_good(struct certs *c, const char *name, struct cert_files *ret)
{
    char san[128];
    (void)snprintf(san, sizeof san, "DNS:%s,IP:127.0.0.1,IP:::1", name);
    certs_make(c, &(struct cert){.name = name, .san = san}, ret);
}

static inline void certs_close(struct certs *c)
{
    char command[128];
    X509_free(c->ours.certificate);
    X509_free(c->foreign.certificate);
    EVP_PKEY_free(c->ours.key);
    EVP_PKEY_free(c->foreign.key);
    (void)snprintf(command, sizeof command, "rm -rf %s", c->directory);
    (void)!system(command);
}

#endif
