/* SPDX-License-Identifier: Apache-2.0
 * Tables of names that a peer has chosen. */
#include "core/base/names.h"
#include "harness.h"

enum { COUNT = 1000, LOW_BITS = 0xfff, LONGEST = 200 };

static uint64_t fnv(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325U;

    for (; *text != '\0'; text++) {
        hash = (hash ^ (uint8_t)*text) * 0x100000001b3U;
    }
    return hash ^ hash >> 32;
}

/* The longest run of slots that are taken: what finding a name may cost. */
static size_t longest_run(const wsync_names_t *names)
{
    size_t run = 0;
    size_t longest = 0;

    for (size_t i = 0; i < names->table.slot_count; i++) {
        run = names->table.slots[i] != 0 ? run + 1 : 0;
        longest = run > longest ? run : longest;
    }
    return longest;
}

/* A hash that everybody can compute would put them all into one place. */
TEST(names_that_were_chosen_to_collide_are_spread)
{
    wsync_names_t names = {0};
    wsync_error_t err = {0};
    char text[32];
    uint32_t index = 0;
    bool added = false;

    for (unsigned i = 0; names.count < COUNT; i++) {
        (void)snprintf(text, sizeof(text), "layers.%u.weight", i);
        if ((fnv(text) & LOW_BITS) == 7) {
            CHECK_OK(wsync_names_add(&names, text, &index, &added, &err), err);
            CHECK(added && index + 1 == names.count);
        }
    }
    CHECK(longest_run(&names) < LONGEST);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK_EQ(wsync_names_find(&names, names.items[i]), i);
    }
    CHECK_EQ(wsync_names_find(&names, "layers"), SIZE_MAX);
    wsync_names_fini(&names);
}

/* Lengths around a word: neither the end of a text nor what follows it plays a part. */
TEST(a_name_is_found_wherever_its_text_lies)
{
    wsync_names_t names = {0};
    wsync_error_t err = {0};
    char text[40] = "";
    uint32_t index = 0;
    bool added = false;

    for (uint32_t i = 0; i < 30; i++) {
        char *elsewhere = strdup(text);

        CHECK(elsewhere != NULL);
        CHECK_OK(wsync_names_add(&names, text, &index, &added, &err), err);
        CHECK(added);
        CHECK_OK(wsync_names_add(&names, elsewhere, &index, &added, &err), err);
        CHECK(!added && index == i);
        free(elsewhere);
        memset(text, 'a', i + 1);
    }
    wsync_names_fini(&names);
}
