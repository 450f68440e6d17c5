/* SPDX-License-Identifier: Apache-2.0
 * Numbers that look random and are the same in every run. */
#ifndef WSYNC_TESTS_DRAW_H
#define WSYNC_TESTS_DRAW_H

#include <stddef.h>
#include <stdint.h>

typedef struct random_state {
    uint64_t state;
} random_state_t;

static inline uint64_t draw(random_state_t *random, uint64_t below)
{
    random->state = random->state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (random->state >> 33) % below;
}

static inline uint64_t draw_among(random_state_t *random, const uint64_t *values,
                                  size_t count)
{
    return values[draw(random, count)];
}

#define DRAW_OF(random, ...)                            \
    draw_among(random, (const uint64_t[]){__VA_ARGS__}, \
               sizeof((const uint64_t[]){__VA_ARGS__}) / 8)

#endif
