/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/encoding.h"
#include "layouts.h"

static wsync_layout_t *sample_of(float scale, float offset)
{
    wsync_layout_builder_t *builder = new_builder();
    wsync_tensor_t scalar = {.name = "scale", .dtype = WSYNC_DTYPE_FLOAT32, .group = 300};
    wsync_shard_t shard = {
        .rank = 1, .buffer = 70000, .offset = 1ULL << 40, .affine = {scale, offset}};
    wsync_error_t err = {0};

    shard.box = wsync_box_whole(0, NULL);
    add_rows(builder, matrix("b\xc3\xa4r", 40, 300), 3, 2, 1000, 10, 20);
    CHECK_OK(wsync_layout_builder_tensor(builder, &scalar, &shard.tensor, &err), err);
    CHECK_OK(wsync_layout_builder_origin(builder, "", &shard.origin, &err), err);
    CHECK_OK(wsync_layout_builder_shard(builder, &shard, &err), err);
    add_rows(builder, matrix("b\xc3\xa4r", 40, 300), 0, 0, 0, 0, 40);
    add_rows(builder, matrix("empty", 0, 3), 0, 0, 0, 0, 0);
    return finish(builder);
}

static wsync_layout_t *sample(void)
{
    return sample_of(0, 0);
}

static uint8_t *encode(const wsync_layout_t *layout, size_t *nbytes)
{
    uint8_t *data = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_layout_encode(layout, &data, nbytes, &err), err);
    return data;
}

TEST(a_layout_survives_the_round_trip)
{
    wsync_layout_t *layout = sample();
    wsync_layout_t *copy = NULL;
    wsync_error_t err = {0};
    size_t nbytes;
    size_t again;
    size_t count;
    uint8_t *data = encode(layout, &nbytes);
    uint8_t *other;
    const wsync_shard_t *shards;

    CHECK_OK(wsync_layout_decode(data, nbytes, &copy, &err), err);
    other = encode(copy, &again);
    CHECK_EQ(again, nbytes);
    CHECK_EQ(memcmp(data, other, nbytes), 0);
    CHECK_EQ(wsync_layout_tensor_count(copy), 3);
    CHECK_EQ(wsync_layout_nbytes(copy), wsync_layout_nbytes(layout));
    CHECK_EQ(wsync_layout_tensor(copy, wsync_layout_find(copy, "scale"))->group, 300);
    shards = wsync_layout_shards(copy, wsync_layout_find(copy, "b\xc3\xa4r"), &count);
    CHECK_EQ(count, 2);
    CHECK_EQ(shards[0].rank, 3);
    CHECK_EQ(shards[0].box.start[0], 10);
    CHECK_EQ(shards[0].stride[0], 600);
    shards = wsync_layout_shards(copy, wsync_layout_find(copy, "scale"), &count);
    CHECK_EQ(shards[0].offset, 1ULL << 40);
    free(data);
    free(other);
    wsync_layout_destroy(layout);
    wsync_layout_destroy(copy);
}

TEST(only_a_layout_that_computes_is_of_the_second_format)
{
    wsync_layout_t *layout = sample_of(-0.5F, 1.25F);
    wsync_layout_t *plain = sample();
    wsync_layout_t *copy = NULL;
    wsync_error_t err = {0};
    size_t nbytes;
    size_t count;
    uint8_t *data = encode(plain, &nbytes);
    const wsync_shard_t *shards;

    CHECK_EQ(data[4], 1);
    free(data);
    data = encode(layout, &nbytes);
    CHECK_EQ(data[4], 2);
    CHECK_OK(wsync_layout_decode(data, nbytes, &copy, &err), err);
    shards = wsync_layout_shards(copy, wsync_layout_find(copy, "scale"), &count);
    CHECK(shards[0].affine.scale == -0.5F && shards[0].affine.offset == 1.25F);
    shards = wsync_layout_shards(copy, wsync_layout_find(copy, "b\xc3\xa4r"), &count);
    CHECK(shards[0].affine.scale == 0 && shards[0].affine.offset == 0);
    free(data);
    wsync_layout_destroy(layout);
    wsync_layout_destroy(plain);
    wsync_layout_destroy(copy);
}

TEST(every_truncation_is_refused)
{
    wsync_layout_t *layout = sample_of(1, 1);
    size_t nbytes;
    uint8_t *data = encode(layout, &nbytes);

    for (size_t i = 0; i < nbytes; i++) {
        wsync_layout_t *copy = NULL;
        wsync_error_t err = {0};
        uint8_t *part =
            malloc(i + 1); /* of its own size, so that a sanitizer sees over-reads */

        memcpy(part, data, i);
        part = realloc(part, i > 0 ? i : 1);
        CHECK_EQ(wsync_layout_decode(part, i, &copy, &err), WSYNC_ERR_PROTOCOL);
        CHECK(copy == NULL);
        CHECK_HAS(err.message, "byte ");
        free(part);
    }
    free(data);
    wsync_layout_destroy(layout);
}

TEST(bytes_after_the_layout_are_refused)
{
    wsync_layout_t *layout = sample();
    wsync_layout_t *copy = NULL;
    wsync_error_t err = {0};
    size_t nbytes;
    uint8_t *data = encode(layout, &nbytes);
    char expected[64];

    data = realloc(data, nbytes + 1);
    data[nbytes] = 0;
    CHECK_EQ(wsync_layout_decode(data, nbytes + 1, &copy, &err), WSYNC_ERR_PROTOCOL);
    (void)snprintf(expected, sizeof(expected), "byte %zu: 1 bytes follow", nbytes);
    CHECK_HAS(err.message, expected);
    free(data);
    wsync_layout_destroy(layout);
}

/* Whatever one changed byte makes of the input, it is refused, or it is the one encoding of
 * another layout. */
static void mutate(wsync_layout_t *layout)
{
    size_t nbytes;
    uint8_t *data = encode(layout, &nbytes);
    int refused = 0;
    int accepted = 0;

    for (size_t i = 0; i < nbytes; i++) {
        const uint8_t before = data[i];

        for (int value = 0; value < 256; value++) {
            wsync_layout_t *copy = NULL;
            wsync_error_t err = {0};
            wsync_status_t status;

            data[i] = (uint8_t)value;
            status = wsync_layout_decode(data, nbytes, &copy, &err);
            if (status == WSYNC_OK) {
                size_t again;
                uint8_t *other = encode(copy, &again);

                CHECK_EQ(again, nbytes);
                CHECK_EQ(memcmp(data, other, nbytes), 0);
                free(other);
                wsync_layout_destroy(copy);
                accepted++;
            } else {
                CHECK_EQ(status, WSYNC_ERR_PROTOCOL);
                CHECK(copy == NULL);
                refused++;
            }
        }
        data[i] = before;
    }
    CHECK_EQ(refused + accepted, 256 * (int)nbytes);
    CHECK(refused > 0 && accepted > (int)nbytes);
    free(data);
    wsync_layout_destroy(layout);
}

TEST(every_mutation_is_refused_or_canonical)
{
    mutate(sample());
    mutate(sample_of(1, 1));
}

static void refuse(const void *data, size_t nbytes, const char *part)
{
    wsync_layout_t *layout = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(wsync_layout_decode(data, nbytes, &layout, &err), WSYNC_ERR_PROTOCOL);
    CHECK(layout == NULL);
    CHECK_HAS(err.message, part);
    CHECK_EQ(wsync_layout_decode(data, nbytes, &layout, NULL), WSYNC_ERR_PROTOCOL);
}

TEST(malformed_input_is_named)
{
    refuse("WSLZ\1", 5, "byte 3: not a layout");
    refuse("WSLY\0\0\0", 7, "byte 4: format 0 of a layout of format 1");
    refuse("WSLY\2\0\0", 7, "byte 4: format 2 of a layout of format 1");
    refuse("WSLY\3\0\0", 7, "byte 4: format 3 of a layout of format 1");
    refuse("WSLY\4\0\0", 7, "byte 4: format 4 exceeds 3");
    refuse("WSLY\3\1\4int8\1\0\4\1a\1\0\1\0\0\0\0\0\0\1\2\2\2", 29,
           "dim 0: start 1 with extent 2 in steps of 3 is not inside shape [4]");
    refuse("WSLY\2\1\4int8\0\0\1a\1\0\1\0\0\0\0\1\0", 24, "no computation from int8");
    refuse("WSLY\2\1\4int8\0\0\1a\1\0\1\0\0\0\0\0\1", 24, "computed with scale 0 and");
    refuse("WSLY\1\x80\x00\0", 8, "byte 6: 0x00 does not end");
    refuse("WSLY\1\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", 15, "byte 14: 0x02");
    refuse("WSLY\1\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 15, "tensor count");
    refuse("WSLY\1\1\4int9\0\0\1a\0\0", 17, "unknown dtype 'int9'");
    refuse("WSLY\1\1\x0atorch.int8\0\0\1a\0\0", 23, "is spelled 'torch.int8'");
    refuse("WSLY\1\1\4int8\7\0\1a\0\0", 17, "number of dimensions 7 exceeds 6");
    refuse("WSLY\1\1\4int8\0\0\0\0\0", 16, "no name");
    refuse("WSLY\1\1\4int8\0\0\1\xff\0\0", 17, "0xff in a tensor name is not UTF-8");
    refuse("WSLY\1\1\4int8\0\0\2a\0\0\0", 18, "0x00 in a tensor name");
    refuse("WSLY\1\1\4int8\0\0\3\xed\xa0\x80\0\0", 19, "not UTF-8");
    refuse(
        "WSLY\1\1\4int8\0\0\x7f"
        "a\0\0",
        17, "a tensor name of 127 bytes where");
    refuse("WSLY\1\2\4int8\0\0\1a\4int8\0\0\1a\0\0\0", 27, "tensor 'a' appears twice");
    refuse("WSLY\1\0\2\1o\1o", 11, "origin 'o' appears twice");
    refuse("WSLY\1\1\4int8\0\0\1a\0\1\0\0\0\0", 21, "origin 0 is not one of the 0 known");
    refuse("WSLY\1\1\4int8\0\0\1a\1\0\1\x80\x80\x04\0\0\0", 24, "rank 65536 exceeds 65535");
}
