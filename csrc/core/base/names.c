/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/names.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { CHUNK_NBYTES = 1 << 14 };

/* Texts lie in chunks, so that they neither move nor cost an allocation each. */
typedef struct wsync_names_chunk {
    struct wsync_names_chunk *next;
    size_t used;
    size_t nbytes;
    char text[];
} names_chunk_t;

__extension__ typedef unsigned __int128 wide_t;

/* Peers choose the names: who cannot know the seed cannot choose names that collide, which
 * would make a table of n names cost n * n. */
static uint64_t hash_text(uint64_t seed, const char *text)
{
    uint64_t hash = seed;
    size_t left = strlen(text);

    while (left > 0) {
        const size_t count = left < sizeof(uint64_t) ? left : sizeof(uint64_t);
        uint64_t word = 0;
        wide_t product;

        memcpy(&word, text, count);
        product = (wide_t)(hash ^ word) * 0x9e3779b97f4a7c15U;
        hash = (uint64_t)product ^ (uint64_t)(product >> 64) ^ seed;
        text += count;
        left -= count;
    }
    return hash;
}

static uint64_t make_seed(const wsync_names_t *names)
{
    uint64_t seed = 0;

    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != (ssize_t)sizeof(seed)) {
        seed = (uint64_t)(uintptr_t)names * 0x9e3779b97f4a7c15U;
    }
    return seed;
}

static uint32_t find(const wsync_names_t *names, const char *text, uint64_t hash)
{
    size_t probe = 0;
    uint32_t index = wsync_table_next(&names->table, hash, &probe);

    while (index != WSYNC_TABLE_NONE && strcmp(names->items[index], text) != 0) {
        index = wsync_table_next(&names->table, hash, &probe);
    }
    return index;
}

static char *copy_text(wsync_names_t *names, const char *text)
{
    const size_t nbytes = strlen(text) + 1;
    names_chunk_t *chunk = names->chunks;
    char *copy;

    if (chunk == NULL || chunk->nbytes - chunk->used < nbytes) {
        const size_t size = nbytes > CHUNK_NBYTES ? nbytes : CHUNK_NBYTES;

        chunk = malloc(sizeof(*chunk) + size);
        if (chunk == NULL) {
            return NULL;
        }
        chunk->next = names->chunks;
        chunk->used = 0;
        chunk->nbytes = size;
        names->chunks = chunk;
    }
    copy = chunk->text + chunk->used;
    memcpy(copy, text, nbytes);
    chunk->used += nbytes;
    return copy;
}

wsync_status_t wsync_names_add(wsync_names_t *names, const char *text, uint32_t *index,
                               bool *added, wsync_error_t *err)
{
    char *copy = NULL;
    uint64_t hash;
    uint32_t found;

    if (names->count == 0) {
        names->seed = make_seed(names);
    }
    hash = hash_text(names->seed, text);
    found = find(names, text, hash);
    *added = found == WSYNC_TABLE_NONE;
    if (*added) {
        found = (uint32_t)names->count;
        if (WSYNC_ARRAY_RESERVE(*names, 1)) {
            copy = copy_text(names, text);
        }
        if (copy == NULL || !wsync_table_add(&names->table, hash)) {
            return wsync_no_memory(err, "names");
        }
        names->items[names->count++] = copy;
    }
    *index = found;
    return WSYNC_OK;
}

size_t wsync_names_find(const wsync_names_t *names, const char *text)
{
    const uint32_t found = find(names, text, hash_text(names->seed, text));

    return found == WSYNC_TABLE_NONE ? SIZE_MAX : found;
}

void wsync_names_fini(wsync_names_t *names)
{
    names_chunk_t *chunk = names->chunks;

    while (chunk != NULL) {
        names_chunk_t *next = chunk->next;

        free(chunk);
        chunk = next;
    }
    free((void *)names->items);
    wsync_table_fini(&names->table);
    *names = (wsync_names_t){0};
}
