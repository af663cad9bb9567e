/* The control process's pure parts: settings, names in place of numbers, fingerprints compared, what is held. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "service/blame.h"
#include "service/compare.h"
#include "service/data_plane_link.h"
#include "service/held.h"
#include "service/mix.h"
#include "service/state.h"

/* --- settings ------------------------------------------------------------------------------------ */

static int parse(struct config *c, const char *text, struct err *e)
{
    config_init(c);
    return config_parse(c, text, "f", e);
}

START_TEST(settings_take_units_and_domains)
{
    struct config c;
    struct err e = {0};
    ck_assert_msg(
        parse(&c,
              "[daemon]\nsocket_mode = 0600\n[devices]\ndevices = 6\ndomains = 4-5 0-2,3\n"
              "chunk_bytes = 3 MiB ; a comment\nnetwork_gbytes_per_s = 0.25\n[refit]\nrelay = no\n",
              &e) == 0,
        "%s", e.text);
    const uint32_t domains[6] = {1, 1, 1, 2, 0, 0};
    ck_assert_uint_eq(c.socket_mode, 384); /* rw for the owner */
    ck_assert_uint_eq(c.chunk_bytes, 3145728);
    ck_assert_uint_eq(c.n_domains, 3);
    ck_assert_mem_eq(c.domain_of_device, domains, sizeof domains);
    ck_assert(c.network_gbytes_per_s > 0.249 && c.network_gbytes_per_s < 0.251);
    ck_assert(!c.relay && c.staging_ingest);
}
END_TEST

START_TEST(settings_stay_as_they_were_after_a_bad_file)
{
    struct config c, before;
    struct err e = {0};
    config_init(&c);
    before = c;
    ck_assert_int_eq(config_parse(&c, "[devices]\ndevices = 2\ndomains = 0-2\n", "f", &e),
                     RS_EINVAL);
    ck_assert_mem_eq(&c, &before, sizeof c);
}
END_TEST

START_TEST(settings_refuse_numbers_that_are_not)
{
    static const char *const bad[] = {"-1", "+1", " 1x", "0x10", "1e3", "99999999999999999999", ""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct config c;
        struct err e = {0};
        char text[128];
        (void)snprintf(text, sizeof text, "[clients]\nmax_workers = %s\n", bad[i]);
        ck_assert_msg(parse(&c, text, &e) == RS_EINVAL, "'%s' was taken", bad[i]);
        ck_assert_msg(strstr(e.text, "f:2") != NULL, "%s", e.text);
    }
}
END_TEST

/* --- names --------------------------------------------------------------------------------------- */

static struct layout *layout_of(const char *text)
{
    struct layout *l = NULL;
    struct err e = {0};
    ck_assert_msg(layout_from_json(text, strlen(text), &l, &e) == 0, "%s", e.text);
    ck_assert_int_eq(layout_digest(l), 0);
    return l;
}

static const char pair_text[] =
    "{\"name\": \"train\", \"ranks\": 3, \"meshes\": [{\"name\": \"dp\", \"shape\": [2], "
    "\"ranks\": [0, 1]},"
    " {\"name\": \"all\", \"shape\": [3], \"ranks\": [0, 1, 2]}], \"tensors\": ["
    "{\"name\": \"a\", \"shape\": [4], \"dtype\": \"int8\", \"mesh\": \"dp\", \"placements\": "
    "[\"Replicate\"]},"
    "{\"name\": \"b\", \"shape\": [6], \"dtype\": \"int8\", \"mesh\": \"all\", \"placements\": "
    "[\"Shard(0)\"]}]}";

START_TEST(numbers_in_failures_become_names_and_unknown_ones_stay)
{
    struct layout *l = layout_of(pair_text);
    struct err e = {0};
    (void)err_set(&e, RS_EDATALOSS,
                  "tensor 1, box [0:2]: tensor 0 of its layout; tensor 9, place 3, tensors 1");
    blame_names(&e, l, NULL);
    ck_assert_str_eq(e.text, "tensor 'b', box [0:2]: tensor 'a'; tensor 9, place 3, tensors 1");
    ck_assert_int_eq(e.code, RS_EDATALOSS);
    layout_free(l);
}
END_TEST

/* --- sources compared ---------------------------------------------------------------------------- */

static void compare_with(const uint64_t fingerprints[3][2],
                         const struct publication_print *expected, int code, const char *word)
{
    struct layout *l = layout_of(pair_text);
    struct publication publications[3] = {0}, *list[3];
    struct err e = {0};
    for (unsigned r = 0; r < 3; r++) {
        publications[r].fingerprints = (uint64_t *)(uintptr_t)fingerprints[r];
        publications[r].n_tensors = 2;
        list[r] = &publications[r];
    }
    publications[2].expected = (struct publication_print *)(uintptr_t)expected;
    publications[2].n_expected = expected != NULL;
    ck_assert_msg(compare_sources(l, list, &e) == code, "%s", e.text);
    ck_assert_msg(word == NULL || strstr(e.text, word) != NULL, "%s", e.text);
    layout_free(l);
}

START_TEST(replicas_that_agree_pass_and_parts_may_differ)
{
    const uint64_t good[3][2] = {{7, 1}, {7, 2}, {0, 3}};
    const struct publication_print sum = {.tensor = 1, .fingerprint = 6},
                                   replica = {.tensor = 0, .fingerprint = 7};
    compare_with(good, NULL, 0, NULL);
    compare_with(good, &sum, 0, NULL);
    compare_with(good, &replica, 0, NULL); /* a replica counts once */
}
END_TEST

START_TEST(differences_of_sources_are_named)
{
    const uint64_t bad[3][2] = {{7, 1}, {8, 2}, {0, 3}}, good[3][2] = {{7, 1}, {7, 2}, {0, 3}};
    const struct publication_print other = {.tensor = 1, .fingerprint = 7};
    compare_with(bad, NULL, RS_EDATALOSS, "tensor 'a' [0:4]: source ranks 0 and 1");
    compare_with(good, &other, RS_EDATALOSS, "tensor 'b'");
    compare_with(bad, &other, RS_EDATALOSS, "tensor 'a' [0:4]: source ranks 0 and 1");
    compare_with(bad, &other, RS_EDATALOSS, "also wrong: 'b'");
}
END_TEST

static const char grid_text[] =
    "{\"name\": \"s\", \"ranks\": 64, \"meshes\": [{\"name\": \"m\", \"shape\": [8, 8], \"ranks\": "
    "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,"
    "32,33,34,35,36,37,38,39,40,41,42,43,44,45,46,47,48,49,50,51,52,53,54,55,56,57,58,59,60,61,62,"
    "63]}], \"tensors\": ["
    "{\"name\": \"a\", \"shape\": [16, 3], \"dtype\": \"bfloat16\", \"mesh\": \"m\", "
    "\"placements\": "
    "[\"Replicate\", \"Shard(0)\"]},"
    "{\"name\": \"b\", \"shape\": [16, 8], \"dtype\": \"bfloat16\", \"mesh\": \"m\", "
    "\"placements\": "
    "[\"Shard(1)\", \"Shard(0)\"]}]}";

/* Of a each column of the mesh has eight replicas, of b nobody has one. Rank `odd` (64: none) has published another a; only the
 * ranks with a bit in `here` take part. */
static void grid_compare(unsigned odd, uint64_t here, const char *word)
{
    struct layout *l = layout_of(grid_text);
    uint64_t fingerprints[64][2];
    struct publication publications[64] = {0}, *list[64];
    struct err e = {0};
    for (unsigned r = 0; r < 64; r++) {
        fingerprints[r][0] = 100 + r % 8 + (r == odd);
        fingerprints[r][1] = 1000 + r;
        publications[r].fingerprints = fingerprints[r];
        list[r] = (here >> r & 1) != 0 ? &publications[r] : NULL;
    }
    ck_assert_int_eq(compare_sources(l, list, &e), word == NULL ? 0 : RS_EDATALOSS);
    ck_assert_msg(word == NULL || strstr(e.text, word) != NULL, "%s", e.text);
    layout_free(l);
}

START_TEST(of_many_replicas_the_one_that_differs_from_the_lowest_is_named)
{
    grid_compare(64, UINT64_MAX, NULL);
    for (unsigned odd = 0; odd < 64; odd++) {
        char word[64];
        unsigned low = odd % 8, high = odd < 8 ? odd + 8 : odd;
        (void)snprintf(word, sizeof word, "source ranks %u and %u hold", low, high);
        grid_compare(odd, UINT64_MAX, word);
        grid_compare(odd, UINT64_C(1) << odd | UINT64_C(1) << (odd + 1) % 64,
                     NULL); /* alone with it */
    }
}
END_TEST

START_TEST(comparing_survives_every_failed_allocation)
{
    struct layout *l = layout_of(pair_text);
    uint64_t fingerprints[3][2] = {{7, 1}, {7, 2}, {0, 3}};
    struct publication publications[3] = {0}, *list[3];
    for (unsigned r = 0; r < 3; r++) {
        publications[r].fingerprints = fingerprints[r];
        list[r] = &publications[r];
    }
    for (long i = 1;; i++) {
        mem_fail_at(i);
        int r = compare_sources(l, list, NULL);
        int failed = mem_failed();
        mem_fail_at(0);
        ck_assert_int_eq(r, failed ? RS_ENOMEM : 0);
        if (!failed)
            break;
    }
    layout_free(l);
}
END_TEST

/* --- what is held -------------------------------------------------------------------------------- */

START_TEST(held_memory_is_believed_for_its_version_layout_and_rank_only)
{
    struct held_store *h = held_new();
    const uint8_t one[16] = {1}, two[16] = {2};
    struct buf row;
    buf_init(&row);
    held_put(&row, one, 0, 100);
    held_put(&row, one, 1, 101);
    ck_assert_int_eq(held_load(h, 5, row.data, row.n_bytes), 0);
    ck_assert(held_is(h, 5, one, 1, 101));
    ck_assert(!held_is(h, 5, one, 1, 100));
    ck_assert(!held_is(h, 5, one, 2, 101));
    ck_assert(!held_is(h, 5, two, 1, 101));
    ck_assert(!held_is(h, 6, one, 1, 101));
    for (uint64_t v = 6; v < 6 + HELD_VERSIONS; v++)
        ck_assert_int_eq(held_load(h, v, row.data, row.n_bytes), 0);
    ck_assert(!held_is(h, 5, one, 1, 101));             /* forgotten */
    ck_assert_int_eq(held_load(h, 99, row.data, 5), 0); /* a row that is cut short names nobody */
    ck_assert(!held_is(h, 99, one, 0, 100));
    buf_close(&row);
    held_free(h);
}
END_TEST

START_TEST(folds_tell_order_length_and_content_apart)
{
    const uint64_t a[3] = {1, 2, 3}, b[3] = {2, 1, 3};
    ck_assert_uint_eq(held_fold(a, 3), held_fold(a, 3));
    ck_assert_uint_ne(held_fold(a, 3), held_fold(b, 3));
    ck_assert_uint_ne(held_fold(a, 2), held_fold(a, 3));
    ck_assert_uint_ne(mix_bytes(0, "ab", 2), mix_bytes(0, "ab\0", 3));
}
END_TEST

/* --- the data plane ------------------------------------------------------------------------------ */

/* While the daemon stops, jobs end and orders come after the link is gone: a part asks for its state, sends, kills. */
START_TEST(a_link_that_is_gone_says_so_and_takes_nothing)
{
    struct link_request r = {.id = 0};
    struct err e = {0};
    ck_assert_int_eq((int)link_state(NULL), (int)LINK_STOPPED);
    ck_assert_str_eq(link_text(NULL), "stopping");
    ck_assert_int_eq(
        link_submit(NULL, &r, (struct wire_header){.type = 0}, NULL, 0, NULL, 0, NULL, 0, 1, &e),
        RS_EUNAVAIL);
    ck_assert_ptr_nonnull(strstr(e.text, "the data plane is stopping"));
    link_kill(NULL, "why");
}
END_TEST

/* --- layouts ------------------------------------------------------------------------------------- */

START_TEST(layouts_make_room_by_forgetting_the_unused_ones_only)
{
    struct layouts store;
    struct layout_entry *entries[3];
    struct err e = {0};
    layouts_init(&store, 2);
    for (unsigned i = 0; i < 3; i++) {
        char text[256];
        (void)snprintf(
            text, sizeof text,
            "{\"name\": \"l%u\", \"ranks\": 1, \"meshes\": [{\"name\": \"m\", \"shape\": [1], "
            "\"ranks\": [0]}],"
            " \"tensors\": [{\"name\": \"t\", \"shape\": [2], \"dtype\": \"int8\", \"mesh\": \"m\","
            " \"placements\": [\"Replicate\"]}]}",
            i);
        ck_assert_int_eq(layouts_add(&store, layout_of(text), &entries[i], &e), 0);
        if (i == 0)
            (void)layout_entry_ref(entries[0]);
    }
    ck_assert_uint_eq(store.n, 2);
    ck_assert_ptr_eq(layouts_find(&store, entries[0]->layout->digest), entries[0]); /* in use */
    ck_assert_ptr_eq(layouts_find(&store, entries[2]->layout->digest), entries[2]);
    (void)layout_entry_ref(entries[2]);
    struct layout_entry *more;
    ck_assert_int_eq(layouts_add(&store, layout_of(pair_text), &more, &e), RS_EEXHAUSTED);
    ck_assert_ptr_nonnull(strstr(e.text, "max_layouts"));
    layout_entry_unref(entries[0]);
    layout_entry_unref(entries[2]);
    layouts_close(&store);
}
END_TEST

#define TESTS(X)                                                                                   \
    X(settings_take_units_and_domains)                                                             \
    X(settings_stay_as_they_were_after_a_bad_file)                                                 \
    X(settings_refuse_numbers_that_are_not)                                                        \
    X(numbers_in_failures_become_names_and_unknown_ones_stay)                                      \
    X(replicas_that_agree_pass_and_parts_may_differ)                                               \
    X(differences_of_sources_are_named)                                                            \
    X(of_many_replicas_the_one_that_differs_from_the_lowest_is_named)                              \
    X(comparing_survives_every_failed_allocation)                                                  \
    X(held_memory_is_believed_for_its_version_layout_and_rank_only)                                \
    X(folds_tell_order_length_and_content_apart)                                                   \
    X(a_link_that_is_gone_says_so_and_takes_nothing)                                               \
    X(layouts_make_room_by_forgetting_the_unused_ones_only)
#include "test/lib/main.h"
