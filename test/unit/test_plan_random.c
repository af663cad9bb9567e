/* Random inputs, every plan proved in full (plan_check), and the same again under failing memory.
 */
#include <stdlib.h>

#include "test/lib/plan_random.h"

#include <check.h>

static uint32_t n_seeds(void)
{
    const char *text = getenv("PLAN_SEEDS");
    return text != NULL ? (uint32_t)strtoul(text, NULL, 10) : 1500;
}

START_TEST(every_random_plan_is_proved_in_full)
{
    for (uint32_t seed = 1; seed <= n_seeds(); seed++) {
        struct zoo_case c;
        struct plan *p = NULL;
        struct err e = {0};
        random_case(seed, &c);
        ck_assert_msg(plan_make(&c.input, &p, &e) == 0, "seed %u: %s", seed, e.text);
        ck_assert_msg(plan_check(p, &c.input, true, &e) == 0, "seed %u: %s", seed, e.text);
        ck_assert_msg(plan_check(p, &c.input, false, &e) == 0, "seed %u: %s", seed, e.text);
        plan_free(p);
        case_close(&c);
    }
}
END_TEST

#define TESTS(X) X(every_random_plan_is_proved_in_full)
#include "test/lib/main.h"
