/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/checksum.h"

#include <string.h>

enum { LANES = 4, LANE_NBYTES = 8 * LANES };

static const uint64_t fnv_basis = UINT64_C(0xcbf29ce484222325);
static const uint64_t fnv_prime = UINT64_C(0x00000100000001b3);

static uint64_t load_word(const uint8_t *from, size_t nbytes)
{
    uint64_t word = 0;

    memcpy(&word, from, nbytes);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* The rotation brings high bits down, which a product alone never does. */
static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * fnv_prime;
    return hash << 29 | hash >> 35;
}

/* One product waits for the one before it: four independent lanes keep the multiplier busy
 * and the memory the limit. */
uint64_t wsync_checksum(const void *data, size_t nbytes)
{
    const uint8_t *at = data;
    uint64_t lane[LANES];
    uint64_t hash = fnv_basis;
    size_t left = nbytes;

    for (uint64_t i = 0; i < LANES; i++) {
        lane[i] = fnv_basis + i;
    }
    for (; left >= LANE_NBYTES; left -= LANE_NBYTES, at += LANE_NBYTES) {
        for (size_t i = 0; i < LANES; i++) {
            lane[i] = mix(lane[i], load_word(at + 8 * i, 8));
        }
    }
    for (int i = 0; i < LANES; i++) {
        hash = mix(hash, lane[i]);
    }
    for (; left >= 8; left -= 8, at += 8) {
        hash = mix(hash, load_word(at, 8));
    }
    if (left > 0) {
        hash = mix(hash, load_word(at, left));
    }
    hash = mix(hash, nbytes);
    return hash != 0 ? hash : 1;
}
