/* reshardctl layout check | show: is a layout file right, and what does it say. */
#include "client/cmd_layout.h"

#include <getopt.h>
#include <inttypes.h>
#include <string.h>

#include "base/json_text.h"

#include "base/banned.h"

static const char usage[] =
    "usage: reshardctl layout check FILE [--source FILE] [--allow-gaps] [--json]\n"
    "       reshardctl layout show FILE [--tensor NAME|GLOB] [--rank R] [--all] [--json]\n"
    "\n"
    "check: proves every rule of a layout. With --source it is taken as a destination and\n"
    "       compared with that source, which is named. Regions that leave a part to nobody are "
    "refused unless\n"
    "       --allow-gaps says that no destination needs it.\n"
    "show:  an inventory; tensors that differ in numbers only share a line (--all: one each).\n"
    "       --tensor: who holds which part. --rank: what one rank holds. FILE '-' is stdin.\n";

/* --- check --------------------------------------------------------------- */

static int check_gaps(const struct layout *l, struct err *e)
{
    for (uint32_t i = 0; i < l->n_tensors; i++) {
        struct box missing;
        char text[256];
        int r = layout_gap(&l->tensors[i], &missing);
        if (r == 1)
            return err_set(e, RS_EINVAL,
                           "layout '%s': tensor '%s': no rank holds %s; add a region, or pass "
                           "--allow-gaps if no destination needs it",
                           l->name, l->tensors[i].name, box_text(&missing, text, sizeof text));
        if (r < 0)
            return err_set(e, r, "out of memory");
    }
    return 0;
}

/* *ret_source is the caller's, also on failure: what the file was compared with, or NULL. */
static int check_file(const struct layout_options *o, struct layout **ret,
                      struct layout **ret_source, struct err *e)
{
    int r = cmd_read_layout(o->file, ret, e);
    if (r == 0 && o->source != NULL)
        r = cmd_read_layout(o->source, ret_source, e);
    if (r == 0 && o->source != NULL)
        r = layout_check_pair(*ret_source, *ret, e);
    if (r == 0 && !o->allow_gaps && o->source == NULL)
        r = check_gaps(*ret, e);
    return r;
}

static uint64_t total_bytes(const struct layout *l)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < l->n_tensors; i++)
        bytes += layout_tensor_bytes(&l->tensors[i]);
    return bytes;
}

static void print_source_json(const struct layout *source)
{
    char digest[33];
    struct buf b;
    layout_digest_text(source->digest, digest);
    buf_init(&b);
    json_put_string(&b, source->name);
    (void)printf(", \"source\": {\"name\": %.*s, \"digest\": \"%s\"}", (int)b.n_bytes,
                 b.n_bytes > 0 ? (const char *)b.data : "\"\"", digest);
    buf_close(&b);
}

static void print_json(const struct layout *l, const struct layout *source,
                       const struct buf *warning)
{
    char digest[33];
    struct buf b;
    layout_digest_text(l->digest, digest);
    buf_init(&b);
    if (warning->n_bytes > 0)
        json_put_string(&b, (const char *)warning->data);
    (void)printf("{\"ok\": true, \"digest\": \"%s\", \"tensors\": %" PRIu32 ", \"bytes\": %" PRIu64
                 ", \"ranks\": %" PRIu32 ", \"instances\": %" PRIu32 ", \"warnings\": [%.*s]",
                 digest, l->n_tensors, total_bytes(l), l->n_ranks, l->n_instances, (int)b.n_bytes,
                 b.n_bytes > 0 ? (const char *)b.data : "");
    buf_close(&b);
    if (source != NULL)
        print_source_json(source);
    (void)printf("}\n");
}

static void print_text(const struct layout *l, const struct layout *source,
                       const struct buf *warning)
{
    char digest[33], bytes[24];
    layout_digest_text(l->digest, digest);
    (void)printf("ok: layout '%s', %" PRIu32 " tensor%s, %s, %" PRIu32 " ranks, %" PRIu32
                 " instance%s, digest %s\n",
                 l->name, l->n_tensors, l->n_tensors == 1 ? "" : "s",
                 cmd_bytes_text(total_bytes(l), bytes, sizeof bytes), l->n_ranks, l->n_instances,
                 l->n_instances == 1 ? "" : "s", digest);
    if (source != NULL) {
        layout_digest_text(source->digest, digest);
        (void)printf("    can be filled from source layout '%s', digest %s\n", source->name,
                     digest);
    }
    if (warning->n_bytes > 0)
        (void)printf("warning: %s\n", (const char *)warning->data);
}

static int print_check(const struct layout *l, const struct layout *source, bool json,
                       struct err *e)
{
    struct buf warning;
    buf_init(&warning);
    int r = cmd_layout_whole(l, &warning);
    if (r == 0 && warning.n_bytes > 0) {
        buf_put(&warning, "", 1);
        r = buf_error(&warning);
    }
    if (r != 0)
        (void)err_set(e, r, "out of memory");
    else if (json)
        print_json(l, source, &warning);
    else
        print_text(l, source, &warning);
    buf_close(&warning);
    return r;
}

static int layout_check_command(const struct layout_options *o)
{
    struct layout *l = NULL, *source = NULL;
    struct err e = {0};
    int r = check_file(o, &l, &source, &e);
    if (r == 0)
        r = print_check(l, source, o->json, &e);
    int code = r == 0 ? CMD_OK : cmd_fail("layout check", o->json, r, &e);
    layout_free(l);
    layout_free(source);
    return cmd_flush("layout check", code);
}

/* --- show ---------------------------------------------------------------- */

static int layout_show_command(const struct layout_options *o)
{
    struct layout *l;
    struct err e = {0};
    int r = cmd_read_layout(o->file, &l, &e);
    if (r != 0)
        return cmd_fail("layout show", o->json, r, &e);
    r = cmd_layout_show(l, o, &e);
    layout_free(l);
    return r == 0 ? cmd_flush("layout show", CMD_OK) : cmd_fail("layout show", o->json, r, &e);
}

/* --- arguments ----------------------------------------------------------- */

static int parse_options(int argc, char **argv, struct layout_options *o)
{
    static const struct option known[] = {
        {"source", required_argument, NULL, 's'}, {"allow-gaps", no_argument, NULL, 'g'},
        {"tensor", required_argument, NULL, 't'}, {"rank", required_argument, NULL, 'r'},
        {"all", no_argument, NULL, 'a'},          {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},         {0}};
    uint64_t rank;
    opterr = 0;
    optind = 0;
    for (int c; (c = getopt_long(argc, argv, ":", known, NULL)) != -1;) {
        switch (c) {
        case 's':
            o->source = optarg;
            break;
        case 'g':
            o->allow_gaps = true;
            break;
        case 't':
            o->tensor = optarg;
            break;
        case 'r':
            if (!cmd_parse_u64(optarg, 0, LAYOUT_MAX_RANKS - 1, &rank))
                return cmd_usage("layout", o->json, "--rank '%s': use a rank id, 0 … %d", optarg,
                                 LAYOUT_MAX_RANKS - 1);
            o->rank = (int64_t)rank;
            break;
        case 'a':
            o->all = true;
            break;
        case 'j':
            o->json = true;
            break;
        case 'h':
            o->help = true;
            return CMD_OK;
        default:
            return cmd_bad_option("layout", o->json, c, argv);
        }
    }
    if (argc - optind > 1)
        return cmd_usage(
            "layout", o->json,
            "one FILE is needed, there are %d: a destination is compared with its source by "
            "layout check DESTINATION --source SOURCE",
            argc - optind);
    if (argc - optind < 1)
        return cmd_usage("layout", o->json, "one FILE is needed");
    o->file = argv[optind];
    return CMD_OK;
}

static int print_usage(void)
{
    (void)fputs(usage, stdout);
    return cmd_flush("layout", CMD_OK);
}

int cmd_layout(int argc, char **argv)
{
    struct layout_options o = {.rank = -1, .json = cmd_wants_json(argc, argv)};
    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return print_usage();
    bool check = argc > 1 && strcmp(argv[1], "check") == 0;
    if (!check && (argc < 2 || strcmp(argv[1], "show") != 0))
        return cmd_usage("layout", o.json, "say 'check' or 'show'");
    int code = parse_options(argc - 1, argv + 1, &o);
    if (code != CMD_OK)
        return code;
    if (o.help)
        return print_usage();
    if (check && (o.tensor != NULL || o.rank >= 0 || o.all))
        return cmd_usage("layout check", o.json, "--tensor, --rank and --all belong to 'show'");
    if (!check && (o.source != NULL || o.allow_gaps))
        return cmd_usage("layout show", o.json, "--source and --allow-gaps belong to 'check'");
    return check ? layout_check_command(&o) : layout_show_command(&o);
}
