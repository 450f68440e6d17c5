/* SPDX-License-Identifier: Apache-2.0
 * Copies whose destinations are files: the bytes go from the source's memory to their file
 * ranges with pwrite, so a full disk is an error and never a signal. */
#ifndef WSYNC_DEVICE_HOST_FILE_WRITE_H
#define WSYNC_DEVICE_HOST_FILE_WRITE_H

#include <stddef.h>
#include <stdint.h>

#include "core/copy.h"

/* What a destination buffer stands for. */
typedef struct wsync_file {
    const char *name; /* for messages; borrowed */
    uint64_t nbytes;  /* nothing is written at this offset or beyond */
    int fd;           /* borrowed; open for writing */
} wsync_file_t;

/* Makes a new file `nbytes` long and takes the space on its device, so that a full one is
 * found before anything is written; where the file system cannot, space is taken as bytes
 * arrive.  OS names file and errno. */
wsync_status_t wsync_host_file_reserve(const wsync_file_t *file, wsync_error_t *err);

/* Runs the copies in the calling thread; destination buffer i is files[i].  Several
 * processes may write to one file if their copies do not overlap.  Bounds are checked
 * before the first byte (INVALID); OS names file, place and errno, and some bytes may be
 * there.  The device is told to begin with what was written; fsync waits for it. */
wsync_status_t wsync_host_file_write(const wsync_copy_t *copies, size_t count,
                                     const wsync_span_t *sources, size_t source_count,
                                     const wsync_file_t *files, size_t file_count,
                                     wsync_error_t *err);

#endif
