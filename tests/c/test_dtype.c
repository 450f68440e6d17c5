/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/dtype.h"
#include "harness.h"

TEST(names_and_sizes_go_both_ways)
{
    wsync_error_t err = {0};
    char name[64];

    for (int i = 0; i < WSYNC_DTYPE_COUNT; i++) {
        wsync_dtype_t dtype = WSYNC_DTYPE_COUNT;

        CHECK_OK(wsync_dtype_from_name(wsync_dtype_name((wsync_dtype_t)i), &dtype, &err),
                 err);
        CHECK_EQ(dtype, i);
        (void)snprintf(name, sizeof(name), "torch.%s", wsync_dtype_name(dtype));
        CHECK_OK(wsync_dtype_from_name(name, &dtype, &err), err);
        CHECK_EQ(dtype, i);
        CHECK(wsync_dtype_nbytes(dtype) >= 1 && wsync_dtype_nbytes(dtype) <= 16);
    }
    CHECK_EQ(wsync_dtype_nbytes(WSYNC_DTYPE_BFLOAT16), 2);
    CHECK_EQ(wsync_dtype_nbytes(WSYNC_DTYPE_COMPLEX128), 16);
}

TEST(unknown_name_is_quoted)
{
    wsync_error_t err = {0};
    wsync_dtype_t dtype = WSYNC_DTYPE_BOOL;

    CHECK_EQ(wsync_dtype_from_name("float12", &dtype, &err), WSYNC_ERR_INVALID);
    CHECK_EQ(dtype, WSYNC_DTYPE_BOOL);
    CHECK_HAS(err.message, "'float12'");
    CHECK_EQ(wsync_dtype_from_name("", &dtype, NULL), WSYNC_ERR_INVALID);
}

TEST(only_listed_pairs_convert)
{
    wsync_error_t err = {0};
    int casts = 0;

    for (int i = 0; i < WSYNC_DTYPE_COUNT; i++) {
        for (int j = 0; j < WSYNC_DTYPE_COUNT; j++) {
            wsync_transform_t transform = WSYNC_TRANSFORM_NONE;
            const wsync_status_t status = wsync_dtype_transform(
                (wsync_dtype_t)i, (wsync_dtype_t)j, false, &transform, &err);

            CHECK(i != j || (status == WSYNC_OK && transform == WSYNC_TRANSFORM_NONE));
            casts += i != j && status == WSYNC_OK;
        }
    }
    CHECK_EQ(casts, 3);
    CHECK_EQ(wsync_dtype_transform(WSYNC_DTYPE_FLOAT16, WSYNC_DTYPE_BFLOAT16, false,
                                   &(wsync_transform_t){0}, &err),
             WSYNC_ERR_UNSUPPORTED);
    CHECK_STR(err.message, "no conversion from float16 to bfloat16");
}

TEST(floats_are_computed_in_their_own_dtype_and_in_those_they_are_cast_to)
{
    wsync_error_t err = {0};
    int computed = 0;

    for (int i = 0; i < WSYNC_DTYPE_COUNT; i++) {
        for (int j = 0; j < WSYNC_DTYPE_COUNT; j++) {
            wsync_transform_t transform = WSYNC_TRANSFORM_NONE;
            const wsync_status_t status = wsync_dtype_transform(
                (wsync_dtype_t)i, (wsync_dtype_t)j, true, &transform, &err);

            CHECK((status == WSYNC_OK) == (transform != WSYNC_TRANSFORM_NONE));
            computed += status == WSYNC_OK;
        }
    }
    CHECK_EQ(computed, 6);
    CHECK_EQ(wsync_dtype_transform(WSYNC_DTYPE_INT8, WSYNC_DTYPE_INT8, true,
                                   &(wsync_transform_t){0}, &err),
             WSYNC_ERR_UNSUPPORTED);
    CHECK_STR(err.message, "no conversion from int8 to int8 with a scale and an offset");
}
