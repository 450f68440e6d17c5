/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/table.h"
#include "harness.h"

enum { COUNT = 5000 };

TEST(an_empty_table_finds_nothing)
{
    wsync_table_t table = {0};

    CHECK_EQ(wsync_table_find(&table, 0), WSYNC_TABLE_NONE);
    wsync_table_clear(&table);
    wsync_table_fini(&table);
}

TEST(entries_are_numbered_in_the_order_of_addition)
{
    wsync_table_t table = {0};

    for (uint64_t i = 0; i < COUNT; i++) {
        CHECK(wsync_table_add(&table, i << 32 | (i % 7)));
    }
    CHECK_EQ(table.keys.count, COUNT);
    CHECK(table.slot_count >= 2 * (size_t)COUNT);
    for (uint64_t i = 0; i < COUNT; i++) {
        CHECK_EQ(wsync_table_find(&table, i << 32 | (i % 7)), i);
    }
    CHECK_EQ(wsync_table_find(&table, (uint64_t)COUNT << 32), WSYNC_TABLE_NONE);
    wsync_table_fini(&table);
}

/* Numbers 0..299 share three keys; the table grows while they are added. */
TEST(all_entries_of_one_key_are_found)
{
    wsync_table_t table = {0};

    for (uint32_t i = 0; i < 300; i++) {
        CHECK(wsync_table_add(&table, i % 3));
    }
    for (uint32_t key = 0; key < 3; key++) {
        bool seen[300] = {false};
        size_t probe = 0;
        uint32_t found = 0;

        for (uint32_t i; (i = wsync_table_next(&table, key, &probe)) != WSYNC_TABLE_NONE;) {
            CHECK(i % 3 == key && !seen[i]);
            seen[i] = true;
            found++;
        }
        CHECK_EQ(found, 100);
    }
    wsync_table_fini(&table);
}

TEST(a_cleared_table_starts_again_at_0)
{
    wsync_table_t table = {0};
    size_t slot_count;

    for (uint64_t i = 0; i < COUNT; i++) {
        CHECK(wsync_table_add(&table, i));
    }
    slot_count = table.slot_count;
    wsync_table_clear(&table);
    CHECK_EQ(wsync_table_find(&table, 1), WSYNC_TABLE_NONE);
    CHECK(wsync_table_add(&table, 42));
    CHECK_EQ(wsync_table_find(&table, 42), 0);
    CHECK_EQ(table.slot_count, slot_count);
    wsync_table_fini(&table);
}
