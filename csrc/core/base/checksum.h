/* SPDX-License-Identifier: Apache-2.0
 * A fast checksum against lost or misplaced bytes; not against malice. */
#ifndef WSYNC_CORE_BASE_CHECKSUM_H
#define WSYNC_CORE_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* Depends on every byte, on their order and on nbytes; the same on all machines.  Never 0.
 */
uint64_t wsync_checksum(const void *data, size_t nbytes);

#endif
