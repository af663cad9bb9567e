#include "rpc/rpc_grpc_tls.h"

#include <string.h>

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include "base/banned.h"

/* --- certificates ----------------------------------------------------------------------------- */

void rpc_grpc_tls_init(struct rpc_grpc_tls *t)
{
    *t = (struct rpc_grpc_tls){.fresh = false};
    rs_assert(pthread_mutex_init(&t->mutex, NULL) == 0);
}

void rpc_grpc_tls_close(struct rpc_grpc_tls *t)
{
    rpc_tls_free(&t->pems);
    (void)pthread_mutex_destroy(&t->mutex);
}

int rpc_grpc_tls_load(struct rpc_grpc_tls *t, const struct rpc_tls_files *files, struct err *e)
{
    struct rpc_tls_pems pems;
    if (files->certificate == NULL)
        return err_set(e, RS_EINVAL,
                       "TLS: a server needs certificate and key besides the authority");
    int r = rpc_tls_load(files, &pems, e);
    if (r != 0)
        return r;
    (void)pthread_mutex_lock(&t->mutex);
    rpc_tls_free(&t->pems);
    t->pems = pems;
    t->fresh = true;
    (void)pthread_mutex_unlock(&t->mutex);
    return 0;
}

/* Any thread of gRPC's. */
static grpc_ssl_certificate_config_reload_status fetch(void *arg,
                                                       grpc_ssl_server_certificate_config **ret)
{
    struct rpc_grpc_tls *t = arg;
    grpc_ssl_certificate_config_reload_status status = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    (void)pthread_mutex_lock(&t->mutex);
    if (t->fresh) {
        grpc_ssl_pem_key_cert_pair pair = {.private_key = t->pems.key,
                                           .cert_chain = t->pems.certificate};
        *ret = grpc_ssl_server_certificate_config_create(t->pems.ca, &pair, 1);
        t->fresh = false;
        status = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
    }
    (void)pthread_mutex_unlock(&t->mutex);
    return status;
}

int rpc_grpc_tls_credentials(struct rpc_grpc_tls *t, bool anonymous, grpc_server_credentials **ret,
                             struct err *e)
{
    *ret = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            anonymous ? GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY
                      : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY,
            fetch, t));
    return *ret != NULL ? 0 : err_set(e, RS_EINTERNAL, "TLS: gRPC takes no certificates");
}

/* --- names ------------------------------------------------------------------------------------ */

/* The first of the property that can be a name of ours. */
static bool find_name(const grpc_auth_context *auth, const char *property, char *ret, size_t size)
{
    grpc_auth_property_iterator it = grpc_auth_context_find_properties_by_name(auth, property);
    const grpc_auth_property *p = grpc_auth_property_iterator_next(&it);
    if (p == NULL || p->value_length == 0 || p->value_length >= size ||
        memchr(p->value, '\0', p->value_length) != NULL)
        return false;
    memcpy(ret, p->value, p->value_length);
    ret[p->value_length] = '\0';
    return true;
}

bool rpc_grpc_tls_identify(grpc_call *call, struct rpc_identity *ret)
{
    grpc_auth_context *auth = grpc_call_auth_context(call);
    bool known = auth != NULL && grpc_auth_context_peer_is_authenticated(auth) != 0;
    if (known) {
        *ret = (struct rpc_identity){.kind = RPC_TLS};
        if (!find_name(auth, GRPC_PEER_DNS_PROPERTY_NAME, ret->name, sizeof ret->name))
            (void)find_name(auth, GRPC_X509_CN_PROPERTY_NAME, ret->name, sizeof ret->name);
    }
    if (auth != NULL)
        grpc_auth_context_release(auth);
    return known;
}
