/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/checksum.h"
#include "harness.h"

/* Every byte and its place matter, at every length around the widths of the loop. */
TEST(every_byte_counts)
{
    uint8_t data[100];

    for (size_t nbytes = 0; nbytes <= sizeof(data); nbytes++) {
        uint64_t sum;

        for (size_t i = 0; i < sizeof(data); i++) {
            data[i] = (uint8_t)(i * 37);
        }
        sum = wsync_checksum(data, nbytes);
        CHECK(sum != 0);
        CHECK(nbytes == 0 || sum != wsync_checksum(data, nbytes - 1));
        for (size_t i = 0; i < nbytes; i++) {
            for (int bit = 0; bit < 8; bit++) {
                data[i] ^= (uint8_t)(1 << bit);
                CHECK(wsync_checksum(data, nbytes) != sum);
                data[i] ^= (uint8_t)(1 << bit);
            }
        }
        for (size_t i = 0; i + 8 < nbytes; i++) {
            const uint8_t kept = data[i];

            data[i] = data[i + 8];
            data[i + 8] = kept;
            CHECK(wsync_checksum(data, nbytes) != sum);
            data[i + 8] = data[i];
            data[i] = kept;
        }
    }
}

/* Both sides of a session compute it, perhaps from different builds. */
TEST(values_are_fixed)
{
    uint8_t zeros[64] = {0};

    CHECK_EQ(wsync_checksum("abc", 3), 0x681498d23782a7b7);
    CHECK(wsync_checksum(zeros, 32) != wsync_checksum(zeros, 64));
}
