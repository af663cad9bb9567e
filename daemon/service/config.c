#include "service/config.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ini.h>

#include "base/mem.h"
#include "base/netaddr.h"
#include "base/size.h"
#include "device/device.h"
#include "exec/budget.h"
#include "refit/refit.h"
#include "service/roles.h"
#include "transport/transport.h"

#include "base/banned.h"

/* LIST: text that may come in several lines. NODES: config_nodes_add, the same. */
enum kind { TEXT, UINT, OCTAL, BYTES, RATE, BOOL, LEVEL, LIST, NODES };

struct setting {
    const char *section;
    const char *key;
    enum kind kind;
    size_t offset;
    size_t size;          /* of the field */
    uint64_t least, most; /* numbers, bytes; in the field's unit */
};

#define FIELD(section, name, kind, least, most)                                                    \
    {                                                                                              \
        section, #name, kind, offsetof(struct config, name), sizeof((struct config *)0)->name,     \
            least, most                                                                            \
    }

static const struct setting settings[] = {
    FIELD("daemon", node, TEXT, 1, 0),
    FIELD("daemon", socket, TEXT, 1, 0),
    FIELD("daemon", socket_mode, OCTAL, 0, 0777),
    FIELD("daemon", state_dir, TEXT, 1, 0),
    FIELD("daemon", tcp, TEXT, 0, 0),
    FIELD("daemon", log_level, LEVEL, 0, 0),
    FIELD("devices", backend, TEXT, 1, 0),
    FIELD("devices", transport, TEXT, 1, 0),
    FIELD("devices", devices, UINT, 1, CONFIG_MAX_DEVICES),
    FIELD("devices", domains, TEXT, 0, 0),
    FIELD("devices", threads, UINT, 0, 1024),
    FIELD("devices", ring_slots, UINT, 1, 1024),
    FIELD("devices", chunk_bytes, BYTES, 4096, UINT64_C(1) << 30),
    FIELD("devices", local_pairs, TEXT, 1, 0),
    FIELD("devices", network_gbytes_per_s, RATE, 0, 0),
    FIELD("devices", domain_gbytes_per_s, RATE, 0, 0),
    FIELD("devices", gpus, LIST, 0, 0),
    FIELD("devices", max_kernel_blocks, UINT, 0, 65535),
    FIELD("devices", max_gpu_memory_bytes, BYTES, 0, UINT64_C(1) << 42),
    FIELD("nccl", max_ctas, UINT, 1, 64),
    FIELD("nccl", shrink, BOOL, 0, 0),
    FIELD("refit", verify, TEXT, 1, 0),
    FIELD("refit", strategy, TEXT, 1, 0),
    FIELD("refit", catch_up, BOOL, 0, 0),
    FIELD("refit", feed, BOOL, 0, 0),
    FIELD("refit", relay, BOOL, 0, 0),
    FIELD("refit", staging_ingest, BOOL, 0, 0),
    FIELD("refit", least_piece_bytes, BYTES, 1, UINT64_C(1) << 40),
    FIELD("refit", prepare_timeout_ms, UINT, 1, 86400000),
    FIELD("refit", transfer_timeout_ms, UINT, 1, 86400000),
    FIELD("refit", accept_timeout_ms, UINT, 1, 86400000),
    FIELD("refit", quiesce_timeout_ms, UINT, 1, 600000),
    FIELD("refit", memory_timeout_ms, UINT, 1, 86400000),
    FIELD("cluster", coordinator, TEXT, 1, 0),
    FIELD("cluster", nodes, NODES, 0, 0),
    FIELD("cluster", data_address, TEXT, 0, 0),
    FIELD("cluster", tls_ca, TEXT, 0, 0),
    FIELD("cluster", tls_certificate, TEXT, 0, 0),
    FIELD("cluster", tls_key, TEXT, 0, 0),
    FIELD("cluster", insecure_network, BOOL, 0, 0),
    FIELD("cluster", lease_ms, UINT, 100, 600000),
    FIELD("cluster", beat_ms, UINT, 10, 60000),
    FIELD("roles", trainer, LIST, 0, 0),
    FIELD("roles", inference, LIST, 0, 0),
    FIELD("roles", operator, LIST, 0, 0),
    FIELD("roles", peer, LIST, 0, 0),
    FIELD("clients", grace_ms, UINT, 0, 3600000),
    FIELD("clients", max_clients, UINT, 1, 65536),
    FIELD("clients", max_segments, UINT, 1, 1024),
    FIELD("clients", max_segment_bytes, BYTES, 1, UINT64_C(1) << 62),
    FIELD("clients", max_workers, UINT, 1, 65536),
    FIELD("clients", max_layouts, UINT, 1, 65536),
    FIELD("clients", max_models, UINT, 1, 65536),
    FIELD("clients", max_queued, UINT, 1, 65536),
    FIELD("clients", max_watchers, UINT, 1, 1000000),
    FIELD("clients", max_versions, UINT, 1, 100000),
    FIELD("test", host_seed, UINT, 0, UINT64_MAX),
    FIELD("test", host_max_delay_us, UINT, 0, 1000000),
};
enum { N_SETTINGS = sizeof settings / sizeof *settings };

struct parse {
    struct config *config;
    uint64_t seen; /* bit i: settings[i] was given */
    struct err error;
};
_Static_assert(N_SETTINGS <= 64, "parse.seen has a bit for each setting");

void config_init(struct config *c)
{
    struct refit_config refit;
    refit_config_default(&refit);
    *c = (struct config){
        .socket = "/run/reshard/reshardd.sock",
        .socket_mode = 0660,
        .state_dir = "/var/lib/reshard",
        .log_level = LOG_INFO,
        .backend = "host",
        .transport = "memory",
        .local_pairs = "copy",
        .devices = 8,
        .ring_slots = 8,
        .chunk_bytes = UINT64_C(8) << 20,
        .max_ctas = 8,
        .verify = "full",
        .strategy = "reshard",
        .catch_up = true,
        .feed = true,
        .relay = true,
        .staging_ingest = true,
        .least_piece_bytes = UINT64_C(256) << 10,
        .prepare_timeout_ms = refit.prepare_timeout_ms,
        .transfer_timeout_ms = refit.transfer_timeout_ms,
        .accept_timeout_ms = refit.accept_timeout_ms,
        .quiesce_timeout_ms = refit.quiesce_timeout_ms,
        .memory_timeout_ms = 300000,
        .lease_ms = 2500,
        .beat_ms = 500,
        .grace_ms = 10000,
        .max_clients = 1024,
        .max_segments = 1024,
        .max_segment_bytes = UINT64_C(1) << 42,
        .max_workers = refit.max_workers,
        .max_layouts = 256,
        .max_models = 64,
        .max_queued = 64,
        .max_watchers = 16384,
        .max_versions = refit.max_versions,
    };
    if (gethostname(c->node, sizeof c->node - 1) != 0 || c->node[0] == '\0')
        (void)snprintf(c->node, sizeof c->node, "localhost");
}

void config_close(struct config *c)
{
    mem_free(c->nodes);
    c->nodes = NULL;
    c->n_nodes = 0;
}

int config_set_node(struct config *c, const char *name, struct err *e)
{
    if (name[0] == '\0' || strlen(name) >= sizeof c->node)
        return err_set(e, RS_EINVAL, "--node: a name has 1 … %zu bytes", sizeof c->node - 1);
    (void)snprintf(c->node, sizeof c->node, "%s", name);
    c->node_fixed = true;
    return 0;
}

static int number_parse(const char *text, int base, uint64_t *ret)
{
    char *end;
    errno = 0;
    if (text[0] == '\0' || strchr("-+ \t", text[0]) != NULL)
        return RS_EINVAL;
    unsigned long long v = strtoull(text, &end, base);
    if (errno != 0 || *end != '\0')
        return RS_EINVAL;
    *ret = v;
    return 0;
}

static int rate_parse(const char *text, double *ret)
{
    char *end;
    errno = 0;
    double v = strtod(text, &end);
    if (errno != 0 || end == text || *end != '\0' || !(v >= 0 && v <= 1e6))
        return RS_EINVAL;
    *ret = v;
    return 0;
}

static int bool_parse(const char *text, bool *ret)
{
    bool yes = strcmp(text, "true") == 0 || strcmp(text, "yes") == 0 || strcmp(text, "on") == 0;
    bool no = strcmp(text, "false") == 0 || strcmp(text, "no") == 0 || strcmp(text, "off") == 0;
    if (!yes && !no)
        return RS_EINVAL;
    *ret = yes;
    return 0;
}

static int number_store(const struct setting *s, void *field, uint64_t v, struct err *e)
{
    if (v < s->least || v > s->most)
        return err_set(e, RS_EINVAL, "%" PRIu64 " is not within %" PRIu64 " … %" PRIu64, v,
                       s->least, s->most);
    if (s->size == sizeof(uint64_t))
        *(uint64_t *)field = v;
    else
        *(uint32_t *)field = (uint32_t)v;
    return 0;
}

static int text_store(const struct setting *s, char *field, const char *value, struct err *e)
{
    size_t n = strlen(value);
    if (n < s->least)
        return err_set(e, RS_EINVAL, "must not be empty");
    if (n >= s->size)
        return err_set(e, RS_EINVAL, "is longer than %zu bytes", s->size - 1);
    memcpy(field, value, n + 1);
    return 0;
}

static int list_add(const struct setting *s, char *field, const char *value, struct err *e)
{
    size_t at = strlen(field), n = strlen(value);
    if (at + n + 2 > s->size)
        return err_set(e, RS_EINVAL, "is longer than %zu bytes", s->size - 1);
    (void)snprintf(field + at, s->size - at, "%s%s", at > 0 && n > 0 ? " " : "", value);
    return 0;
}

static int setting_store(const struct setting *s, struct config *c, const char *value,
                         struct err *e)
{
    void *field = (char *)c + s->offset;
    uint64_t v = 0;
    switch (s->kind) {
    case TEXT:
        return text_store(s, field, value, e);
    case UINT:
        if (number_parse(value, 10, &v) != 0)
            return err_set(e, RS_EINVAL, "'%s' is no whole number", value);
        return number_store(s, field, v, e);
    case OCTAL:
        if (number_parse(value, 8, &v) != 0)
            return err_set(e, RS_EINVAL, "'%s' is no octal number such as 0660", value);
        return number_store(s, field, v, e);
    case BYTES:
        if (size_parse(value, &v) != 0)
            return err_set(e, RS_EINVAL, "'%s' is no size; write bytes, or KiB, MiB, GiB, TiB",
                           value);
        return number_store(s, field, v, e);
    case RATE:
        if (rate_parse(value, field) != 0)
            return err_set(e, RS_EINVAL, "'%s' is no rate in GB/s (0: not limited)", value);
        return 0;
    case BOOL:
        if (bool_parse(value, field) != 0)
            return err_set(e, RS_EINVAL, "'%s' is neither true nor false", value);
        return 0;
    case LIST:
        return list_add(s, field, value, e);
    case NODES:
        return config_nodes_add(c, value, e);
    case LEVEL:
        if (log_level_parse(value, field) != 0)
            return err_set(e, RS_EINVAL, "'%s' is no level; use error, warn, info or debug", value);
        return 0;
    }
    return RS_EINTERNAL;
}

static const struct setting *setting_find(const char *section, const char *key, bool *ret_section)
{
    for (unsigned i = 0; i < N_SETTINGS; i++) {
        if (strcmp(settings[i].section, section) != 0)
            continue;
        *ret_section = true;
        if (strcmp(settings[i].key, key) == 0)
            return &settings[i];
    }
    return NULL;
}

/* inih's callback: 0 marks the line as bad; only the first bad line is kept. */
static int on_setting(void *user, const char *section, const char *key, const char *value)
{
    struct parse *p = user;
    bool known_section = false;
    if (p->error.code != 0)
        return 0;
    const struct setting *s = setting_find(section, key, &known_section);
    if (s == NULL) {
        (void)err_set(&p->error, RS_EINVAL,
                      known_section
                          ? "unknown key '%s' in section [%s]"
                          : "key '%s': unknown section [%s]; there are [daemon], [devices], "
                            "[nccl], [refit], [cluster], [roles], [clients], [test]",
                      key, section);
        return 0;
    }
    uint64_t bit = UINT64_C(1) << (s - settings);
    bool lines = s->kind == LIST || s->kind == NODES;
    int r = 0;
    if ((p->seen & bit) != 0 && !lines)
        r = err_set(&p->error, RS_EINVAL, "given twice");
    else if (s->offset != offsetof(struct config, node) || !p->config->node_fixed)
        r = setting_store(s, p->config, value, &p->error);
    if (r != 0)
        (void)err_prefix(&p->error, r, "%s", key);
    p->seen |= bit;
    return r == 0;
}

/* inih reads lines into a fixed buffer and takes the rest of a longer one for the next line. */
static int lines_check(const char *text, const char *name, struct err *e)
{
    enum { MOST = INI_MAX_LINE - 2 };
    int line = 1;
    for (const char *at = text, *end; at != NULL; at = end != NULL ? end + 1 : NULL, line++) {
        end = strchr(at, '\n');
        size_t n = end != NULL ? (size_t)(end - at) : strlen(at);
        if (n > MOST)
            return err_set(e, RS_EINVAL,
                           "%s:%d: longer than %d bytes; lists (nodes, roles) may go on in a next "
                           "line that begins with a space",
                           name, line, MOST);
    }
    return 0;
}

static int settings_read(struct config *next, const char *text, const char *name, struct err *e)
{
    struct parse p = {.config = next};
    int line = ini_parse_string(text, on_setting, &p);
    if (line < 0)
        return err_set(e, RS_ENOMEM, "%s: no memory to read it", name);
    if (line > 0 || p.error.code != 0)
        return err_set(e, p.error.code != 0 ? p.error.code : RS_EINVAL, "%s:%d: %s", name, line,
                       p.error.code != 0 ? p.error.text : "neither [section] nor key = value");
    int r = config_check(next, e);
    return r != 0 ? err_prefix(e, r, "%s", name) : 0;
}

int config_parse(struct config *c, const char *text, const char *name, struct err *e)
{
    struct config next = *c;
    next.nodes = NULL;
    next.n_nodes = 0;
    int r = lines_check(text, name, e);
    if (r == 0)
        r = settings_read(&next, text, name, e);
    if (r != 0) {
        config_close(&next);
        return r;
    }
    config_close(c);
    *c = next;
    return 0;
}

int config_read(struct config *c, const char *path, struct err *e)
{
    enum { MAX_BYTES = 1 << 20 };
    struct stat st;
    char *text = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int r = 0;
    if (fd < 0)
        return err_set(e, err_from_errno(errno), "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size > MAX_BYTES)
        r = err_set(e, RS_EINVAL, "%s: not a regular file of at most 1 MiB", path);
    if (r == 0 && (text = mem_zalloc((size_t)st.st_size + 1)) == NULL)
        r = err_set(e, RS_ENOMEM, "%s: no memory to read it", path);
    if (r == 0 && pread(fd, text, (size_t)st.st_size, 0) != (ssize_t)st.st_size)
        r = err_set(e, RS_EIO, "%s: could not be read", path);
    if (r == 0)
        r = config_parse(c, text, path, e);
    mem_free(text);
    (void)close(fd);
    return r;
}

/* One group of `domains`: "0-3" or "5". */
static int domain_group(struct config *c, const char *group, bool *taken, struct err *e)
{
    unsigned first, last;
    char rest;
    int n = sscanf(group, "%u-%u%c", &first, &last, &rest);
    if (n == 1 && strchr(group, '-') == NULL && sscanf(group, "%u%c", &first, &rest) == 1)
        last = first;
    else if (n != 2)
        return err_set(e, RS_EINVAL, "domains: '%s' is neither a device nor a range such as 0-3",
                       group);
    if (first > last || last >= c->devices)
        return err_set(e, RS_EINVAL, "domains: '%s' is not within 0 … %u (devices = %u)", group,
                       c->devices - 1, c->devices);
    for (unsigned d = first; d <= last; d++) {
        if (taken[d])
            return err_set(e, RS_EINVAL, "domains: device %u stands in two domains", d);
        taken[d] = true;
        c->domain_of_device[d] = c->n_domains;
    }
    c->n_domains++;
    return 0;
}

static int domains_check(struct config *c, struct err *e)
{
    bool taken[CONFIG_MAX_DEVICES] = {false};
    char text[CONFIG_MAX_VALUE];
    char *save = NULL;
    c->n_domains = 0;
    memset(c->domain_of_device, 0, sizeof c->domain_of_device);
    memcpy(text, c->domains, sizeof text);
    for (char *g = strtok_r(text, " ,\t", &save); g != NULL; g = strtok_r(NULL, " ,\t", &save)) {
        int r = domain_group(c, g, taken, e);
        if (r != 0)
            return r;
    }
    if (c->n_domains == 0) {
        c->n_domains = 1;
        return 0;
    }
    for (unsigned d = 0; d < c->devices; d++)
        if (!taken[d])
            return err_set(e, RS_EINVAL, "domains: device %u stands in none", d);
    return 0;
}

static int choice_check(const char *key, const char *value, const char *a, const char *b,
                        const char *c, struct err *e)
{
    if (strcmp(value, a) == 0 || strcmp(value, b) == 0 || strcmp(value, c) == 0)
        return 0;
    return err_set(e, RS_EINVAL, "%s: '%s' is unknown; use %s, %s or %s", key, value, a, b, c);
}

/* Past "GPU-" or "MIG-". */
static const char *bare(const char *name)
{
    return strncasecmp(name, "GPU-", 4) == 0 || strncasecmp(name, "MIG-", 4) == 0 ? name + 4 : name;
}

static int gpus_check(struct config *c, struct err *e)
{
    char text[CONFIG_MAX_ROLE];
    char *save = NULL;
    c->n_gpus = 0;
    memcpy(text, c->gpus, sizeof text);
    for (char *g = strtok_r(text, " ,\t", &save); g != NULL; g = strtok_r(NULL, " ,\t", &save)) {
        if (c->n_gpus == c->devices || strlen(g) >= sizeof c->gpu_of_device[0])
            return err_set(
                e, RS_EINVAL,
                c->n_gpus == c->devices
                    ? "gpus: '%.60s' is one more than devices = %u"
                    : "gpus: '%.60s' is no name of a GPU: write its uuid as nvidia-smi -L "
                      "has it, or its index",
                g, c->devices);
        for (uint32_t i = 0; i < c->n_gpus; i++)
            if (strcasecmp(bare(c->gpu_of_device[i]), bare(g)) == 0)
                return err_set(e, RS_EINVAL, "gpus: '%s' stands twice", g);
        (void)snprintf(c->gpu_of_device[c->n_gpus++], sizeof c->gpu_of_device[0], "%s", g);
    }
    if (c->n_gpus != 0 && c->n_gpus != c->devices)
        return err_set(e, RS_EINVAL, "gpus: %u are named, devices = %u: name one for each",
                       c->n_gpus, c->devices);
    if (c->n_gpus != 0 && strcmp(c->backend, "cuda") != 0)
        return err_set(e, RS_EINVAL, "gpus: they are for backend = cuda, which is '%s'",
                       c->backend);
    return 0;
}

static int gpu_memory_check(const struct config *c, struct err *e)
{
    const struct budget_settings s = {.limit_bytes = c->max_gpu_memory_bytes,
                                      .n_devices = c->devices,
                                      .ring_slots = c->ring_slots,
                                      .slot_bytes = c->chunk_bytes,
                                      .n_threads = c->threads,
                                      .max_ctas = c->max_ctas};
    return strcmp(c->backend, "cuda") == 0 ? budget_check(&s, e) : 0;
}

/* What asks for GPUs where they can't be used is told at the start, not in a refit. */
static int backend_check(struct config *c, struct err *e)
{
    bool cuda = strcmp(c->backend, "cuda") == 0;
    const char *names[CONFIG_MAX_DEVICES];
    int r = gpus_check(c, e);
    for (uint32_t i = 0; i < c->n_gpus; i++)
        names[i] = c->gpu_of_device[i];
    if (r == 0)
        r = gpu_memory_check(c, e);
    if (r == 0)
        r = choice_check("transport", c->transport, "memory", "tcp", "nccl", e);
    if (r == 0 && strcmp(c->local_pairs, "copy") != 0 && strcmp(c->local_pairs, "transport") != 0)
        r = err_set(e, RS_EINVAL, "local_pairs: '%s' is unknown; use copy or transport",
                    c->local_pairs);
    if (r == 0 && cuda != (strcmp(c->transport, "nccl") == 0))
        r = err_set(e, RS_EINVAL, "%s",
                    cuda ? "backend: cuda moves bytes between GPUs by NCCL: set transport = nccl"
                         : "transport: nccl needs GPUs: set backend = cuda, or transport = memory");
    if (r == 0)
        r = device_backend_check(c->backend, c->devices, c->n_gpus != 0 ? names : NULL, e);
    if (r == 0)
        r = transport_check(c->transport, e);
    return r == 0 ? 0 : err_prefix(e, r, "[devices]");
}

/* As the listener judges it, before it is started. */
static int tcp_check(const struct config *c, struct err *e)
{
    struct netaddr a;
    if (c->tcp[0] == '\0')
        return 0;
    int r = netaddr_parse(c->tcp, NETADDR_PORT_OR_ANY, &a, e);
    if (r != 0)
        return err_prefix(e, r, "tcp");
    return netaddr_is_loopback(&a)
               ? 0
               : err_set(e, RS_EINVAL,
                         "tcp: %s can be reached from outside, and calls there carry no identity: "
                         "use 127.0.0.1; for other nodes there is [cluster]",
                         c->tcp);
}

int config_check(struct config *c, struct err *e)
{
    int r = domains_check(c, e);
    if (r == 0)
        r = choice_check("verify", c->verify, "off", "sampled", "full", e);
    if (r == 0)
        r = choice_check("strategy", c->strategy, "reshard", "direct", "gather-broadcast", e);
    if (r != 0)
        return r;
    if ((r = config_cluster_check(c, e)) != 0 || (r = roles_config_check(c, e)) != 0)
        return r;
    if ((r = tcp_check(c, e)) != 0 || (r = backend_check(c, e)) != 0)
        return r;
    /* "<socket>.mem" and "<socket>.lock" must fit into sun_path too. */
    if (strlen(c->socket) + strlen(".mem") > 107)
        return err_set(e, RS_EINVAL,
                       "socket: longer than 103 bytes, which a socket's address can't hold");
    return 0;
}
