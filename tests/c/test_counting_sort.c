/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/counting_sort.h"

#include "harness.h"

enum { COUNT = 1000, KEYS = 37 };

typedef struct item {
    char padding;
    uint32_t key;
    uint64_t index;
} item_t;

static wsync_keyed_t keyed(const item_t *items, size_t count, size_t key_count)
{
    return (wsync_keyed_t){items, count, sizeof(item_t), offsetof(item_t, key), key_count};
}

TEST(items_are_sorted_and_keep_their_order)
{
    item_t items[COUNT];
    const wsync_keyed_t all = keyed(items, COUNT, KEYS);
    size_t *first = NULL;
    size_t *counted;
    item_t *sorted;

    for (uint32_t i = 0; i < COUNT; i++) {
        items[i] = (item_t){.key = i * i % (KEYS - 1), .index = i}; /* some have no item */
    }
    sorted = wsync_sort_by_key(&all, &first);
    counted = wsync_count_keys(&all);
    CHECK(sorted != NULL && counted != NULL);
    CHECK_EQ(first[0], 0);
    CHECK_EQ(first[KEYS], COUNT);
    CHECK(memcmp(first, counted, (KEYS + 1) * sizeof(*first)) == 0);
    for (uint32_t key = 0; key < KEYS; key++) {
        for (size_t i = first[key]; i < first[key + 1]; i++) {
            CHECK_EQ(sorted[i].key, key);
            CHECK_EQ(items[sorted[i].index].key, key);
            CHECK(i == first[key] || sorted[i - 1].index < sorted[i].index);
        }
    }
    free(first);
    free(counted);
    free(sorted);
}

TEST(nothing_is_sorted)
{
    const wsync_keyed_t none = keyed(NULL, 0, 2);
    size_t *first = NULL;
    item_t *sorted = wsync_sort_by_key(&none, &first);

    CHECK(sorted != NULL);
    CHECK(first[0] == 0 && first[1] == 0 && first[2] == 0);
    free(first);
    free(sorted);
}
