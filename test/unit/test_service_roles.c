/* Who may do what: every method against every kind of caller. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "service/api.h"
#include "service/front.h"
#include "service/proxy.h"
#include "service/roles.h"

#include "base/mem.h"

static struct config settings(const char *text)
{
    struct config c;
    struct err e = {0};
    config_init(&c);
    ck_assert_msg(config_parse(&c, text, "f", &e) == 0, "%s", e.text);
    return c;
}

static struct rpc_identity local(uint32_t uid)
{
    return (struct rpc_identity){.kind = RPC_LOCAL, .client = 1, .uid = uid};
}

static struct rpc_identity certificate(const char *name)
{
    struct rpc_identity who = {.kind = RPC_TLS};
    (void)snprintf(who.name, sizeof who.name, "%s", name);
    return who;
}

static const struct rpc_identity nobody = {.kind = RPC_ANONYMOUS};

static bool may(const struct config *c, struct rpc_identity who, const char *path)
{
    return roles_check(c, &who, path, NULL) == 0;
}

START_TEST(a_local_client_has_every_role_until_some_role_names_a_uid)
{
    struct config open = settings("[roles]\ntrainer = trainer-*\n");
    struct config named = settings("[roles]\noperator = uid:0 uid:7\ntrainer = trainer-*\n");
    struct rpc_identity root = local(0), user = local(1000), seventy = local(70);
    ck_assert_uint_eq(roles_of(&open, &user), ROLE_TRAINER | ROLE_INFERENCE | ROLE_OPERATOR);
    ck_assert_uint_eq(roles_of(&named, &root), ROLE_OPERATOR);
    ck_assert_uint_eq(roles_of(&named, &user), 0);
    ck_assert_uint_eq(roles_of(&named, &seventy), 0); /* 7 is not the beginning of 70 */
    ck_assert(may(&named, root, "/reshard.v1.Admin/Abort"));
    ck_assert(!may(&named, user, "/reshard.v1.Admin/Abort"));
    ck_assert(!may(&named, root, "/reshard.v1.Refit/Submit"));
}
END_TEST

START_TEST(a_certificate_has_the_roles_that_name_it)
{
    struct config c = settings("[roles]\ntrainer = trainer-* both\ninference = both uid:5\n");
    struct rpc_identity trainer = certificate("trainer-3"), both = certificate("both"),
                        other = certificate("x-trainer-3"), uid = certificate("uid:5");
    ck_assert_uint_eq(roles_of(&c, &trainer), ROLE_TRAINER);
    ck_assert_uint_eq(roles_of(&c, &both), ROLE_TRAINER | ROLE_INFERENCE);
    ck_assert_uint_eq(roles_of(&c, &other), 0);
    ck_assert_uint_eq(roles_of(&c, &uid), 0); /* a certificate can't play a uid */
    struct rpc_identity nameless = certificate("");
    struct config all = settings("[roles]\noperator = *\n");
    ck_assert_uint_eq(roles_of(&all, &nameless), 0);
}
END_TEST

/* From the table of the settings' file (config/reshardd.conf), written down a second time. */
static const struct {
    const char *path;
    const char *roles; /* letters of those that may: t, i, o; "" all */
} expected[] = {
    {"Refit/PutLayout", ""},    {"Refit/Attach", "ti"},       {"Refit/Publish", "t"},
    {"Refit/Submit", "t"},      {"Refit/WatchRefit", ""},     {"Refit/Ready", "i"},
    {"Refit/Accept", "i"},      {"Refit/Apply", "i"},         {"Refit/Mark", "tio"},
    {"Refit/GetCommitted", ""}, {"Refit/WatchCommitted", ""}, {"Admin/Status", ""},
    {"Admin/Versions", "o"},    {"Admin/Timeline", "o"},      {"Admin/Abort", "o"},
    {"Admin/Evict", "o"},       {"Admin/Drain", "o"},         {"Refit/Sleep", "ti"},
    {"Refit/Withdraw", "t"},
};

START_TEST(every_method_takes_the_roles_that_the_settings_tell)
{
    struct config c = settings("[roles]\ntrainer = t\ninference = i\noperator = o\n");
    size_t n;
    const struct rpc_method *methods = api_methods(&n);
    for (size_t m = 0; m < n; m++) {
        const char *roles = NULL;
        for (size_t k = 0; k < sizeof expected / sizeof *expected; k++)
            if (strcmp(methods[m].path + strlen("/reshard.v1."), expected[k].path) == 0)
                roles = expected[k].roles;
        ck_assert_msg(roles != NULL, "%s: no role is told for it", methods[m].path);
        for (const char *r = "tio"; *r != '\0'; r++) {
            const char name[2] = {*r, '\0'};
            ck_assert_msg(may(&c, certificate(name), methods[m].path) ==
                              (roles[0] == '\0' || strchr(roles, *r) != NULL),
                          "%s by role %s", methods[m].path, name);
        }
        ck_assert_msg(may(&c, certificate("stranger"), methods[m].path) == (roles[0] == '\0'),
                      "%s by a stranger", methods[m].path);
    }
}
END_TEST

START_TEST(who_says_nothing_reads_until_an_operator_is_named)
{
    struct config open = settings(""), named = settings("[roles]\noperator = ops\n");
    ck_assert(may(&open, nobody, "/reshard.v1.Admin/Versions"));
    ck_assert(!may(&named, nobody, "/reshard.v1.Admin/Versions"));
    ck_assert(may(&named, nobody, "/reshard.v1.Admin/Status"));
    ck_assert(
        may(&named, nobody, "/reshard.v1.Refit/Submit")); /* refused for its lack of a token */
    ck_assert(roles_identified("/reshard.v1.Refit/Submit"));
    ck_assert(!roles_identified("/reshard.v1.Admin/Versions"));
}
END_TEST

START_TEST(a_refusal_names_the_role_and_the_caller)
{
    struct config c = settings("[roles]\ntrainer = t\ninference = i\n");
    struct rpc_identity who = certificate("i");
    struct err e = {0};
    ck_assert_int_eq(roles_check(&c, &who, "/reshard.v1.Refit/Submit", &e), RS_EPERM);
    ck_assert_msg(strstr(e.text, "Submit needs the role trainer") && strstr(e.text, "'i'") &&
                      strstr(e.text, "has inference"),
                  "%s", e.text);
    ck_assert_int_eq(roles_check_side(&c, &who, true, &e), RS_EPERM);
    ck_assert_msg(strstr(e.text, "source") && strstr(e.text, "trainer"), "%s", e.text);
    ck_assert_int_eq(roles_check_side(&c, &who, false, &e), 0);
}
END_TEST

START_TEST(the_side_of_an_attach_is_read_before_anything_else)
{
    /* hello (1) { model (1) "m", side (2) = DESTINATION } */
    const uint8_t hello[] = {0x0a, 5, 0x0a, 1, 'm', 0x10, 2};
    ck_assert_uint_eq(roles_hello_side(hello, sizeof hello), 2);
    const uint8_t done[] = {0x1a, 0};
    ck_assert_uint_eq(roles_hello_side(done, sizeof done), 0);
    const uint8_t twice[] = {0x0a, 2, 0x10, 2,
                             0x0a, 2, 0x10, 1}; /* the last one holds, as in protobuf */
    ck_assert_uint_eq(roles_hello_side(twice, sizeof twice), 1);
    ck_assert_uint_eq(roles_hello_side("\x0a\xff", 2), 0);
}
END_TEST

START_TEST(roles_that_make_no_sense_are_refused)
{
    static const char *const bad[] = {"operator = uid:", "operator = uid:x", "trainer = uid:1x",
                                      "peer = uid:0"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct config c;
        struct err e = {0};
        char text[64];
        (void)snprintf(text, sizeof text, "[roles]\n%s\n", bad[i]);
        config_init(&c);
        ck_assert_msg(config_parse(&c, text, "f", &e) == RS_EINVAL, "'%s' was taken", bad[i]);
        ck_assert_msg(strstr(e.text, "uid") != NULL, "%s", e.text);
    }
}
END_TEST

START_TEST(a_member_passes_on_what_only_the_coordinator_decides)
{
    static const char text[] = "[daemon]\nnode = %s\n[cluster]\ncoordinator = n0\n"
                               "nodes = n0=127.0.0.1:1 n1=127.0.0.1:2\n";
    for (int member = 0; member < 2; member++) {
        char filled[256];
        (void)snprintf(filled, sizeof filled, text, member ? "n1" : "n0");
        struct config c = settings(filled);
        struct rpc_method *methods;
        size_t n;
        unsigned proxied = 0, joins = 0;
        ck_assert_int_eq(front_methods(&c, &methods, &n, NULL), 0);
        for (size_t i = 0; i < n; i++) {
            proxied += methods[i].on_message == proxy_message;
            joins += strcmp(methods[i].path, "/reshard.v1.Peer/Join") == 0;
        }
        ck_assert_uint_eq(proxied, member ? 9 : 0);
        ck_assert_uint_eq(joins, 1);
        mem_free(methods);
        config_close(&c);
    }
}
END_TEST

#define TESTS(X)                                                                                   \
    X(a_local_client_has_every_role_until_some_role_names_a_uid)                                   \
    X(a_certificate_has_the_roles_that_name_it)                                                    \
    X(every_method_takes_the_roles_that_the_settings_tell)                                         \
    X(who_says_nothing_reads_until_an_operator_is_named)                                           \
    X(a_refusal_names_the_role_and_the_caller)                                                     \
    X(the_side_of_an_attach_is_read_before_anything_else)                                          \
    X(roles_that_make_no_sense_are_refused)                                                        \
    X(a_member_passes_on_what_only_the_coordinator_decides)

#include "test/lib/main.h"
