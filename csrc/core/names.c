/* SPDX-License-Identifier: Apache-2.0 */
#include "core/names.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "core/array.h"

enum { FIRST_SLOT_COUNT = 64, CHUNK_NBYTES = 1 << 14 };

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
static uint32_t hash_text(uint64_t seed, const char *text)
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
    return (uint32_t)(hash ^ (hash >> 32));
}

static uint64_t make_seed(const wsync_names_t *names)
{
    uint64_t seed = 0;

    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != (ssize_t)sizeof(seed)) {
        seed = (uint64_t)(uintptr_t)names * 0x9e3779b97f4a7c15U;
    }
    return seed;
}

/* The slot that holds the text, or the free one where it belongs. */
static size_t find_slot(const wsync_names_t *names, const char *text, uint32_t hash)
{
    const size_t mask = names->slot_count - 1;
    size_t slot = hash & mask;

    while (names->slots[slot] != 0) {
        const wsync_name_t *name = &names->items[names->slots[slot] - 1];

        if (name->hash == hash && strcmp(name->text, text) == 0) {
            break;
        }
        slot = (slot + 1) & mask;
    }
    return slot;
}

static bool grow_slots(wsync_names_t *names)
{
    const size_t count = names->slot_count == 0 ? FIRST_SLOT_COUNT : names->slot_count * 2;
    uint32_t *slots;

    /* At most half full, or probing gets slow. */
    if (names->count < names->slot_count / 2) {
        return true;
    }
    slots = calloc(count, sizeof(*slots));
    if (slots == NULL) {
        return false;
    }
    if (names->slot_count == 0) {
        names->seed = make_seed(names);
    }
    for (size_t i = 0; i < names->count; i++) {
        size_t slot = names->items[i].hash & (count - 1);

        while (slots[slot] != 0) {
            slot = (slot + 1) & (count - 1);
        }
        slots[slot] = (uint32_t)i + 1;
    }
    free(names->slots);
    names->slots = slots;
    names->slot_count = count;
    return true;
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
    wsync_name_t *items = NULL;
    char *copy = NULL;
    uint32_t hash = 0;
    size_t slot;

    if (grow_slots(names)) {
        hash = hash_text(names->seed, text);
        slot = find_slot(names, text, hash);
        if (names->slots[slot] != 0) {
            *index = names->slots[slot] - 1;
            *added = false;
            return WSYNC_OK;
        }
        if (names->count < UINT32_MAX - 1) {
            items = wsync_array_reserve(names->items, &names->capacity, names->count + 1,
                                        sizeof(*items));
        }
        if (items != NULL) {
            names->items = items;
            copy = copy_text(names, text);
        }
    }
    if (copy == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "names",
                          "no memory for '%.200s' after %zu names", text, names->count);
    }
    *index = (uint32_t)names->count;
    *added = true;
    names->items[names->count++] = (wsync_name_t){copy, hash};
    names->slots[slot] = *index + 1;
    return WSYNC_OK;
}

size_t wsync_names_find(const wsync_names_t *names, const char *text)
{
    size_t slot;

    if (names->slot_count == 0) {
        return SIZE_MAX;
    }
    slot = find_slot(names, text, hash_text(names->seed, text));
    return names->slots[slot] == 0 ? SIZE_MAX : names->slots[slot] - 1;
}

void wsync_names_fini(wsync_names_t *names)
{
    names_chunk_t *chunk = names->chunks;

    while (chunk != NULL) {
        names_chunk_t *next = chunk->next;

        free(chunk);
        chunk = next;
    }
    free(names->items);
    free(names->slots);
    *names = (wsync_names_t){0};
}
