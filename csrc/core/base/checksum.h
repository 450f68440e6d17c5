/* SPDX-License-Identifier: Apache-2.0
 * A fast checksum that finds lost and misplaced bytes.  It is not cryptographic. */
#ifndef WSYNC_CORE_BASE_CHECKSUM_H
#define WSYNC_CORE_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* Depends on every byte, on their order and on nbytes.  The same on all machines; never
 * 0. */
uint64_t wsync_checksum(const void *data, size_t nbytes);

#endif
