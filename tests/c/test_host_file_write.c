/* SPDX-License-Identifier: Apache-2.0
 * Copies into files against the same copies into memory. */
#include "core/copy.h"
#include "device/host_copy.h"
#include "device/host_file_write.h"
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

enum { ROWS = 300, COLUMNS = 2100, BEFORE = 64 };

/* float32 [ROWS, COLUMNS] with these strides (bytes) -> a contiguous part of a file */
static wsync_copies_t copy_of(int64_t row_stride, int64_t column_stride, wsync_dtype_t to,
                              int64_t columns)
{
    const int64_t item = (int64_t)wsync_dtype_nbytes(to);
    int64_t extent[WSYNC_MAX_NDIM];
    wsync_place_t source = {.dtype = WSYNC_DTYPE_FLOAT32};
    wsync_place_t destination = {.dtype = to, .offset = BEFORE};
    wsync_copies_t copies = {0};
    wsync_error_t err = {0};

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        extent[i] = 1;
    }
    extent[0] = ROWS;
    extent[1] = columns;
    source.stride[0] = row_stride;
    source.stride[1] = column_stride;
    destination.stride[0] = COLUMNS * item;
    destination.stride[1] = item;
    CHECK_OK(wsync_copies_append(&copies, extent, &source, &destination, &err), err);
    return copies;
}

static void check_as_in_memory(wsync_copies_t *copies)
{
    const size_t nbytes = sizeof(float) * ROWS * COLUMNS;
    const size_t file_nbytes = BEFORE + nbytes;
    float *data = malloc(nbytes);
    unsigned char *expected = calloc(1, file_nbytes);
    unsigned char *found = malloc(file_nbytes);
    char name[] = "/tmp/wsync-file-XXXXXX";
    const int fd = mkstemp(name);
    const wsync_span_t source = {data, nbytes};
    const wsync_span_t memory = {expected, file_nbytes};
    const wsync_file_t file = {.name = name, .nbytes = file_nbytes, .fd = fd};
    wsync_error_t err = {0};

    CHECK(data != NULL && expected != NULL && found != NULL && fd >= 0);
    (void)unlink(name);
    CHECK(ftruncate(fd, (off_t)file_nbytes) == 0);
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        data[i] = (float)i * 1.25F;
    }
    wsync_host_copy_run(copies->items, copies->count, &source, &memory);
    CHECK_OK(
        wsync_host_file_write(copies->items, copies->count, &source, 1, &file, 1, &err),
        err);
    CHECK(pread(fd, found, file_nbytes, 0) == (ssize_t)file_nbytes);
    CHECK(memcmp(found, expected, file_nbytes) == 0);
    (void)close(fd);
    free(data);
    free(expected);
    free(found);
    wsync_copies_fini(copies);
}

TEST(contiguous_bytes_go_as_they_are)
{
    wsync_copies_t copies = copy_of(4 * COLUMNS, 4, WSYNC_DTYPE_FLOAT32, COLUMNS);

    check_as_in_memory(&copies);
}

TEST(a_part_of_the_columns_leaves_the_others_alone)
{
    wsync_copies_t copies = copy_of(4 * COLUMNS, 4, WSYNC_DTYPE_FLOAT32, COLUMNS / 3);

    check_as_in_memory(&copies);
}

TEST(transposed_storage_is_gathered)
{
    wsync_copies_t copies = copy_of(4, 4 * ROWS, WSYNC_DTYPE_FLOAT32, COLUMNS);

    check_as_in_memory(&copies);
}

TEST(casts_happen_on_the_way)
{
    wsync_copies_t whole = copy_of(4 * COLUMNS, 4, WSYNC_DTYPE_BFLOAT16, COLUMNS);
    wsync_copies_t part = copy_of(4, 4 * ROWS, WSYNC_DTYPE_FLOAT16, COLUMNS / 2);

    check_as_in_memory(&whole);
    check_as_in_memory(&part);
}

TEST(a_full_device_is_named)
{
    float data[16] = {0};
    const wsync_span_t source = {data, sizeof(data)};
    const wsync_copy_t copy = {
        .row_count = 16, .source_item_nbytes = 4, .destination_item_nbytes = 4};
    wsync_file_t file = {.name = "shard", .nbytes = sizeof(data)};
    wsync_error_t err = {0};

    file.fd = open("/dev/full", O_WRONLY | O_CLOEXEC);
    if (file.fd < 0) {
        SKIP("/dev/full is not there");
    }
    CHECK(wsync_host_file_write(&copy, 1, &source, 1, &file, 1, &err) == WSYNC_ERR_OS);
    CHECK(err.native == ENOSPC);
    CHECK(strstr(err.message, "shard: writing 64 bytes at 0") != NULL);
    (void)close(file.fd);
}

TEST(a_reserved_file_has_its_size_and_its_space)
{
    char name[] = "/tmp/wsync-file-XXXXXX";
    wsync_file_t file = {.name = name, .nbytes = 1 << 20};
    wsync_error_t err = {0};
    struct stat facts;

    file.fd = mkstemp(name);
    CHECK(file.fd >= 0);
    (void)unlink(name);
    CHECK_OK(wsync_host_file_reserve(&file, &err), err);
    CHECK(fstat(file.fd, &facts) == 0);
    CHECK(facts.st_size == 1 << 20);
    if (facts.st_blocks != 0) { /* the file system reserves */
        CHECK(facts.st_blocks >= (1 << 20) / 512);
        file.nbytes = (uint64_t)1 << 55;
        CHECK(wsync_host_file_reserve(&file, &err) == WSYNC_ERR_OS);
        CHECK(err.native == ENOSPC || err.native == EFBIG);
        CHECK(strstr(err.message, "reserving 36028797018963968 bytes") != NULL);
    }
    (void)close(file.fd);
    file.fd = -1;
    CHECK(wsync_host_file_reserve(&file, &err) == WSYNC_ERR_OS);
    CHECK(err.native == EBADF);
}

TEST(bounds_are_checked_first)
{
    float data[16] = {0};
    const wsync_span_t source = {data, sizeof(data)};
    const wsync_copy_t copy = {.row_count = 16,
                               .source_item_nbytes = 4,
                               .destination_item_nbytes = 4,
                               .destination_offset = 1};
    const wsync_file_t file = {.name = "shard", .nbytes = sizeof(data), .fd = -1};
    wsync_error_t err = {0};

    CHECK(wsync_host_file_write(&copy, 1, &source, 1, &file, 1, &err) == WSYNC_ERR_INVALID);
    CHECK(wsync_host_file_write(&copy, 1, &source, 1, &file, 0, &err) == WSYNC_ERR_INVALID);
    CHECK(wsync_host_file_write(NULL, 0, NULL, 0, NULL, 0, &err) == WSYNC_OK);
}
