/* SPDX-License-Identifier: Apache-2.0 */
#include "device/host_file_write.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/host_copy.h"

enum {
    /* What is cast or gathered on its way: fits the second cache. */
    STAGING_NBYTES = 1 << 20,
    /* Linux writes no more than 2 GiB less a page at once. */
    MAX_WRITE_NBYTES = 1 << 30,
};

typedef struct range {
    uint64_t first;
    uint64_t last; /* exclusive */
} range_t;

typedef struct writer {
    const wsync_span_t *sources;
    const wsync_file_t *files;
    range_t *written;       /* owned; one for each file */
    unsigned char *staging; /* owned; allocated when it is first needed */
} writer_t;

/* A copy as writes, each contiguous in the file: `steps` indices of dimension `depth`
 * (ndim: of the row), `inner_nbytes` each, with all that lies inside. */
typedef struct division {
    unsigned depth;
    uint64_t inner_nbytes;
    uint64_t extent;
    uint64_t steps;
    int64_t source_stride;
    int64_t destination_stride;
} division_t;

static bool is_direct(const wsync_copy_t *copy, const division_t *division)
{
    /* dimensions that are contiguous on both sides were coalesced into the row */
    return copy->transform == WSYNC_TRANSFORM_NONE && division->depth == copy->ndim;
}

static division_t divide(const wsync_copy_t *copy)
{
    division_t division = {.depth = copy->ndim,
                           .inner_nbytes = copy->destination_item_nbytes,
                           .extent = copy->row_count};

    while (division.depth > 0 &&
           division.inner_nbytes * division.extent <= STAGING_NBYTES &&
           (uint64_t)copy->destination_stride[division.depth - 1] ==
               division.inner_nbytes * division.extent) {
        division.inner_nbytes *= division.extent;
        division.depth--;
        division.extent = (uint64_t)copy->extent[division.depth];
    }
    division.steps = division.extent;
    if (!is_direct(copy, &division) &&
        division.steps > STAGING_NBYTES / division.inner_nbytes) {
        division.steps = STAGING_NBYTES / division.inner_nbytes;
    }
    division.source_stride = division.depth == copy->ndim
                                 ? copy->source_item_nbytes
                                 : copy->source_stride[division.depth];
    division.destination_stride = (int64_t)division.inner_nbytes;
    if (division.depth < copy->ndim) {
        division.destination_stride = copy->destination_stride[division.depth];
    }
    return division;
}

static wsync_status_t write_all(const wsync_file_t *file, const unsigned char *data,
                                uint64_t nbytes, uint64_t offset, wsync_error_t *err)
{
    while (nbytes > 0) {
        const size_t part = nbytes < MAX_WRITE_NBYTES ? (size_t)nbytes : MAX_WRITE_NBYTES;
        const ssize_t written = pwrite(file->fd, data, part, (off_t)offset);

        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            const int native = written < 0 ? errno : EIO;

            return wsync_fail(err, WSYNC_ERR_OS, native, "pwrite",
                              "%.256s: writing %llu bytes at %llu: %s", file->name,
                              (unsigned long long)nbytes, (unsigned long long)offset,
                              strerror(native));
        }
        data += written;
        nbytes -= (uint64_t)written;
        offset += (uint64_t)written;
    }
    return WSYNC_OK;
}

/* Gathers or casts one write's bytes into the staging. */
static void stage(const writer_t *writer, const wsync_copy_t *copy,
                  const division_t *division, uint64_t source_offset, uint64_t steps)
{
    const wsync_span_t staging = {writer->staging, STAGING_NBYTES};
    wsync_copy_t part = *copy;

    part.source_offset = source_offset;
    part.destination_offset = 0;
    part.destination_buffer = 0;
    part.ndim = (uint8_t)(copy->ndim - division->depth);
    if (part.ndim == 0) {
        part.row_count = steps;
    }
    for (unsigned i = 0; i < part.ndim; i++) {
        part.extent[i] = copy->extent[division->depth + i];
        part.source_stride[i] = copy->source_stride[division->depth + i];
        part.destination_stride[i] = copy->destination_stride[division->depth + i];
    }
    if (part.ndim > 0) {
        part.extent[0] = (int64_t)steps;
    }
    wsync_host_copy_run(&part, 1, writer->sources, &staging);
}

/* All writes at one index of the dimensions outside the division. */
static wsync_status_t write_steps(writer_t *writer, const wsync_copy_t *copy,
                                  const division_t *division, uint64_t source_offset,
                                  uint64_t destination_offset, wsync_error_t *err)
{
    const bool direct = is_direct(copy, division);
    wsync_status_t status = WSYNC_OK;

    for (uint64_t at = 0; at < division->extent && status == WSYNC_OK;
         at += division->steps) {
        const uint64_t left = division->extent - at;
        const uint64_t steps = left < division->steps ? left : division->steps;
        const uint64_t from =
            source_offset + (uint64_t)((int64_t)at * division->source_stride);
        const uint64_t to =
            destination_offset + (uint64_t)((int64_t)at * division->destination_stride);
        const unsigned char *data = writer->staging;
        const uint64_t nbytes = steps * division->inner_nbytes;
        range_t *written = &writer->written[copy->destination_buffer];

        if (direct) {
            data = (const unsigned char *)writer->sources[copy->source_buffer].data + from;
        } else {
            stage(writer, copy, division, from, steps);
        }
        status = write_all(&writer->files[copy->destination_buffer], data, nbytes, to, err);
        written->first = to < written->first ? to : written->first;
        written->last = to + nbytes > written->last ? to + nbytes : written->last;
    }
    return status;
}

static wsync_status_t write_copy(writer_t *writer, const wsync_copy_t *copy,
                                 wsync_error_t *err)
{
    const division_t division = divide(copy);
    int64_t index[WSYNC_COPY_NDIM] = {0};
    uint64_t source = copy->source_offset;
    uint64_t destination = copy->destination_offset;
    unsigned d;

    if (writer->staging == NULL && !is_direct(copy, &division)) {
        writer->staging = malloc(STAGING_NBYTES);
        if (writer->staging == NULL) {
            return wsync_no_memory(err, "file");
        }
    }
    do {
        const wsync_status_t status =
            write_steps(writer, copy, &division, source, destination, err);

        if (status != WSYNC_OK) {
            return status;
        }
        for (d = division.depth; d > 0; d--) {
            source += (uint64_t)copy->source_stride[d - 1];
            destination += (uint64_t)copy->destination_stride[d - 1];
            if (++index[d - 1] < copy->extent[d - 1]) {
                break;
            }
            source -= (uint64_t)(copy->extent[d - 1] * copy->source_stride[d - 1]);
            destination -=
                (uint64_t)(copy->extent[d - 1] * copy->destination_stride[d - 1]);
            index[d - 1] = 0;
        }
    } while (d > 0);
    return WSYNC_OK;
}

static wsync_status_t check_copies(const wsync_copy_t *copies, size_t count,
                                   const wsync_span_t *sources, size_t source_count,
                                   const wsync_file_t *files, size_t file_count,
                                   wsync_error_t *err)
{
    wsync_span_t *ranges = calloc(file_count + 1, sizeof(*ranges));
    wsync_status_t status;

    if (ranges == NULL) {
        return wsync_no_memory(err, "file");
    }
    for (size_t i = 0; i < file_count; i++) {
        ranges[i].nbytes = files[i].nbytes;
    }
    status =
        wsync_copies_check(copies, count, sources, source_count, ranges, file_count, err);
    free(ranges);
    return status;
}

wsync_status_t wsync_host_file_reserve(const wsync_file_t *file, wsync_error_t *err)
{
    long result = TEMP_FAILURE_RETRY(fallocate(file->fd, 0, 0, (off_t)file->nbytes));

    if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
        result = ftruncate(file->fd, (off_t)file->nbytes);
    }
    if (result != 0) {
        const int native = errno;

        return wsync_fail(err, WSYNC_ERR_OS, native, "fallocate",
                          "%.256s: reserving %llu bytes: %s", file->name,
                          (unsigned long long)file->nbytes, strerror(native));
    }
    return WSYNC_OK;
}

/* Otherwise the device stands idle until fsync, which then waits for all of it. */
static void begin_write_back(const writer_t *writer, size_t file_count)
{
    for (size_t i = 0; i < file_count; i++) {
        const range_t *range = &writer->written[i];

        if (range->last > range->first) {
            (void)sync_file_range(writer->files[i].fd, (off_t)range->first,
                                  (off_t)(range->last - range->first),
                                  SYNC_FILE_RANGE_WRITE);
        }
    }
}

wsync_status_t wsync_host_file_write(const wsync_copy_t *copies, size_t count,
                                     const wsync_span_t *sources, size_t source_count,
                                     const wsync_file_t *files, size_t file_count,
                                     wsync_error_t *err)
{
    writer_t writer = {.sources = sources, .files = files};
    wsync_status_t status =
        check_copies(copies, count, sources, source_count, files, file_count, err);

    if (status != WSYNC_OK) {
        return status;
    }
    writer.written = calloc(file_count + 1, sizeof(*writer.written));
    if (writer.written == NULL) {
        return wsync_no_memory(err, "file");
    }
    for (size_t i = 0; i < file_count; i++) {
        writer.written[i].first = files[i].nbytes;
    }
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        status = write_copy(&writer, &copies[i], err);
    }
    begin_write_back(&writer, file_count);
    free(writer.written);
    free(writer.staging);
    return status;
}
