/* SPDX-License-Identifier: Apache-2.0
 * Compiled kernels on disk.  Any number of processes may read and write one folder: a file
 * appears whole or not at all, and two that are written at once are equal. */
#ifndef WSYNC_DEVICE_CUDA_COMPILE_CACHE_H
#define WSYNC_DEVICE_CUDA_COMPILE_CACHE_H

#include <stdbool.h>
#include <stddef.h>

#include "core/base/status.h"

/* The file `name` of the folder, if both belong to this user, nobody else can write them
 * and the content is what was stored.  False: there is nothing to use.  *data is the
 * caller's. */
bool wsync_cache_load(const char *folder, const char *name, void **data, size_t *nbytes);

/* Puts a file, named wsync-*.bin, in place; makes the folder, for this user alone, if there
 * is none.  False if that did not work, which harms nobody. */
bool wsync_cache_store(const char *folder, const char *name, const void *data,
                       size_t nbytes);

#endif
