/* SPDX-License-Identifier: Apache-2.0
 * Whole reads and writes.  False with errno if not all of it was read or written (EIO: the
 * file ended). */
#ifndef WSYNC_DEVICE_IO_H
#define WSYNC_DEVICE_IO_H

#include <stdbool.h>
#include <stddef.h>

bool wsync_read_all(int fd, void *data, size_t nbytes, size_t offset);
bool wsync_write_all(int fd, const void *data, size_t nbytes);

#endif
