/* SPDX-License-Identifier: Apache-2.0 */
#include "core/copy.h"
#include "device/host_copy.h"
#include "draw.h"
#include "harness.h"

static wsync_place_t place(wsync_dtype_t dtype, uint64_t offset, int64_t outer,
                           int64_t inner)
{
    const wsync_place_t made = {.dtype = dtype, .offset = offset, .stride = {outer, inner}};

    return made;
}

/* Coalesces a two-dimensional copy. */
static wsync_copies_t append(int64_t rows, int64_t columns, wsync_place_t source,
                             wsync_place_t destination)
{
    const int64_t extent[WSYNC_MAX_NDIM] = {rows, columns, 1, 1, 1, 1};
    wsync_copies_t copies = {0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_copies_append(&copies, extent, &source, &destination, &err), err);
    return copies;
}

TEST(contiguous_boxes_are_one_row)
{
    wsync_copies_t copies = append(5, 7, place(WSYNC_DTYPE_BFLOAT16, 4, 14, 2),
                                   place(WSYNC_DTYPE_BFLOAT16, 8, 14, 2));

    CHECK_EQ(copies.count, 1);
    CHECK_EQ(copies.items[0].ndim, 0);
    CHECK_EQ(copies.items[0].row_count, 35);
    CHECK_EQ(copies.items[0].source_offset, 4);
    CHECK_EQ(copies.items[0].destination_offset, 8);
    CHECK_EQ(wsync_copies_nbytes(copies.items, copies.count), 70);
    wsync_copies_fini(&copies);
    CHECK(copies.items == NULL);
}

TEST(a_column_block_keeps_its_rows)
{
    wsync_copies_t copies = append(5, 7, place(WSYNC_DTYPE_BFLOAT16, 0, 40, 2),
                                   place(WSYNC_DTYPE_BFLOAT16, 0, 14, 2));

    CHECK_EQ(copies.count, 1);
    CHECK_EQ(copies.items[0].ndim, 1);
    CHECK_EQ(copies.items[0].row_count, 7);
    CHECK_EQ(copies.items[0].extent[0], 5);
    CHECK_EQ(copies.items[0].source_stride[0], 40);
    wsync_copies_fini(&copies);
}

TEST(transposed_storage_has_rows_of_one_element)
{
    wsync_copies_t copies = append(5, 7, place(WSYNC_DTYPE_FLOAT32, 0, 4, 20),
                                   place(WSYNC_DTYPE_FLOAT32, 0, 28, 4));

    CHECK_EQ(copies.count, 1);
    CHECK_EQ(copies.items[0].row_count, 1);
    CHECK_EQ(copies.items[0].ndim, 2);
    wsync_copies_fini(&copies);
}

TEST(the_same_transposition_on_both_sides_is_one_row)
{
    wsync_copies_t copies = append(5, 7, place(WSYNC_DTYPE_FLOAT32, 0, 4, 20),
                                   place(WSYNC_DTYPE_FLOAT32, 0, 4, 20));

    CHECK_EQ(copies.items[0].ndim, 0);
    CHECK_EQ(copies.items[0].row_count, 35);
    wsync_copies_fini(&copies);
}

TEST(a_cast_row_is_contiguous_in_both_item_sizes)
{
    wsync_copies_t copies = append(5, 7, place(WSYNC_DTYPE_FLOAT32, 0, 28, 4),
                                   place(WSYNC_DTYPE_BFLOAT16, 0, 14, 2));

    CHECK_EQ(copies.items[0].ndim, 0);
    CHECK_EQ(copies.items[0].row_count, 35);
    CHECK_EQ(copies.items[0].transform, WSYNC_TRANSFORM_F32_TO_BF16);
    CHECK_EQ(copies.items[0].source_item_nbytes, 4);
    CHECK_EQ(copies.items[0].destination_item_nbytes, 2);
    CHECK_EQ(wsync_copies_nbytes(copies.items, 1), 70);
    wsync_copies_fini(&copies);
    /* Contiguous in bytes alone is not enough. */
    copies = append(5, 7, place(WSYNC_DTYPE_FLOAT32, 0, 56, 8),
                    place(WSYNC_DTYPE_BFLOAT16, 0, 14, 2));
    CHECK_EQ(copies.items[0].row_count, 1);
    CHECK_EQ(copies.items[0].ndim, 1);
    CHECK_EQ(copies.items[0].extent[0], 35);
    wsync_copies_fini(&copies);
}

TEST(empty_boxes_append_nothing)
{
    wsync_copies_t copies = append(0, 7, place(WSYNC_DTYPE_FLOAT32, 0, 28, 4),
                                   place(WSYNC_DTYPE_FLOAT32, 0, 28, 4));

    CHECK_EQ(copies.count, 0);
    CHECK(copies.items == NULL);
}

TEST(impossible_casts_are_refused)
{
    const int64_t extent[WSYNC_MAX_NDIM] = {1, 1, 1, 1, 1, 1};
    const wsync_place_t source = place(WSYNC_DTYPE_BFLOAT16, 0, 0, 0);
    const wsync_place_t destination = place(WSYNC_DTYPE_FLOAT16, 0, 0, 0);
    wsync_copies_t copies = {0};
    wsync_error_t err = {0};

    CHECK_EQ(wsync_copies_append(&copies, extent, &source, &destination, &err),
             WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "bfloat16 to float16");
    CHECK_EQ(copies.count, 0);
}

/* Six strides of a random permutation of row-major storage with a gap after each dimension;
 * returns the bytes spanned. */
static uint64_t random_strides(random_state_t *random, const int64_t extent[WSYNC_MAX_NDIM],
                               size_t item_nbytes, int64_t stride[WSYNC_MAX_NDIM])
{
    unsigned order[WSYNC_MAX_NDIM] = {0, 1, 2, 3, 4, 5};
    int64_t step = (int64_t)item_nbytes;

    for (unsigned i = WSYNC_MAX_NDIM; i-- > 1;) {
        const unsigned j = draw(random, 3) == 0 ? (unsigned)draw(random, i + 1) : i;
        const unsigned swap = order[i];

        order[i] = order[j];
        order[j] = swap;
    }
    for (unsigned i = WSYNC_MAX_NDIM; i-- > 0;) {
        stride[order[i]] = step;
        step *= extent[order[i]];
        if (draw(random, 3) == 0) {
            step += (int64_t)item_nbytes;
        }
    }
    return (uint64_t)step;
}

TEST(random_copies_move_every_element)
{
    enum { NBYTES = 1 << 15, ROUNDS = 500 };
    static uint8_t source[NBYTES];
    static uint8_t expected[NBYTES];
    static uint8_t found[NBYTES];
    const wsync_span_t from_span = {source, NBYTES};
    const wsync_span_t to_span = {found, NBYTES};
    random_state_t random = {7};
    int several = 0;

    for (int i = 0; i < NBYTES; i++) {
        source[i] = (uint8_t)draw(&random, 256);
    }
    for (int round = 0; round < ROUNDS; round++) {
        int64_t extent[WSYNC_MAX_NDIM];
        wsync_place_t from = {.dtype = WSYNC_DTYPE_INT16, .offset = 6};
        wsync_place_t to = {.dtype = WSYNC_DTYPE_INT16, .offset = 10};
        wsync_copies_t copies = {0};
        wsync_error_t err = {0};
        int64_t count = 1;

        for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
            extent[i] = 1 + (int64_t)draw(&random, 3);
            count *= extent[i];
        }
        CHECK(random_strides(&random, extent, 2, from.stride) + from.offset <= NBYTES);
        CHECK(random_strides(&random, extent, 2, to.stride) + to.offset <= NBYTES);
        memset(expected, 0xee, NBYTES);
        memset(found, 0xee, NBYTES);
        for (int64_t index = 0; index < count; index++) {
            int64_t rest = index;
            size_t a = from.offset;
            size_t b = to.offset;

            for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
                a += (size_t)(rest % extent[i] * from.stride[i]);
                b += (size_t)(rest % extent[i] * to.stride[i]);
                rest /= extent[i];
            }
            memcpy(expected + b, source + a, 2);
        }
        CHECK_OK(wsync_copies_append(&copies, extent, &from, &to, &err), err);
        CHECK_EQ(wsync_copies_nbytes(copies.items, copies.count), 2 * count);
        wsync_host_copy_run(copies.items, copies.count, &from_span, &to_span);
        CHECK_EQ(memcmp(expected, found, NBYTES), 0);
        several += copies.count > 1;
        wsync_copies_fini(&copies);
    }
    CHECK(several > 0); /* more outer dimensions than one copy holds */
}

TEST(check_accepts_what_fits_exactly)
{
    wsync_copies_t copies = append(5, 7, place(WSYNC_DTYPE_BFLOAT16, 6, 40, 2),
                                   place(WSYNC_DTYPE_BFLOAT16, 8, 14, 2));
    wsync_span_t source = {NULL, 6 + 4 * 40 + 14};
    wsync_span_t destination = {NULL, 8 + 70};
    wsync_error_t err = {0};

    CHECK_OK(wsync_copies_check(copies.items, 1, &source, 1, &destination, 1, &err), err);
    source.nbytes--;
    CHECK_EQ(wsync_copies_check(copies.items, 1, &source, 1, &destination, 1, &err),
             WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "copy 0: source buffer 0");
    CHECK_HAS(err.message, "179 bytes");
    source.nbytes++;
    destination.nbytes--;
    CHECK_EQ(wsync_copies_check(copies.items, 1, &source, 1, &destination, 1, &err),
             WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "copy 0: destination buffer 0");
    CHECK_EQ(wsync_copies_check(copies.items, 1, &source, 1, &destination, 0, &err),
             WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "destination buffer 0 is not one of the 0");
    wsync_copies_fini(&copies);
}

TEST(check_refuses_arithmetic_that_wraps)
{
    const wsync_copy_t good = {
        .row_count = 1,
        .source_item_nbytes = 1,
        .destination_item_nbytes = 1,
        .ndim = 1,
        .extent = {2},
        .source_stride = {1},
        .destination_stride = {1},
    };
    const wsync_span_t span = {NULL, 100};
    wsync_copy_t copy = good;
    wsync_error_t err = {0};

    CHECK_OK(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), err);
    copy.source_offset = UINT64_MAX;
    CHECK_EQ(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), WSYNC_ERR_INVALID);
    copy = good;
    copy.row_count = UINT64_MAX;
    copy.source_item_nbytes = 2;
    CHECK_EQ(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), WSYNC_ERR_INVALID);
    copy = good;
    copy.extent[0] = INT64_MAX;
    copy.destination_stride[0] = INT64_MAX;
    CHECK_EQ(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), WSYNC_ERR_INVALID);
    copy = good;
    copy.source_stride[0] = -1; /* would read before the buffer */
    CHECK_EQ(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), WSYNC_ERR_INVALID);
    copy.source_offset = 1;
    CHECK_OK(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), err);
    copy.source_stride[0] = INT64_MIN;
    CHECK_EQ(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), WSYNC_ERR_INVALID);
    copy = good;
    copy.extent[0] = 0;
    CHECK_EQ(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), WSYNC_ERR_INVALID);
    copy = good;
    copy.ndim = WSYNC_COPY_NDIM + 1;
    CHECK_EQ(wsync_copies_check(&copy, 1, &span, 1, &span, 1, &err), WSYNC_ERR_INVALID);
}
