/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/nccl_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/library_search.h"

#define NCCL_LIBRARY "libnccl.so.2"

typedef struct entry {
    const char *symbol;
    int since;
    size_t offset; /* in the table */
} entry_t;

static const entry_t entries[] = {
#define ENTRY(result, member, symbol, since, parameters) \
    {#symbol, since, offsetof(wsync_nccl_library_t, member)},
    WSYNC_NCCL_MAP(ENTRY)
#undef ENTRY
};
enum { ENTRY_COUNT = sizeof(entries) / sizeof(entries[0]) };

/* Filled once. */
static struct {
    pthread_mutex_t mutex;
    bool found;
    wsync_nccl_library_t library;
} table = {.mutex = PTHREAD_MUTEX_INITIALIZER};  // NOLINT(cppcoreguidelines-*)

static wsync_status_t open_library(const char *const *paths, size_t path_count,
                                   void **library, wsync_error_t *err)
{
    const char *named = secure_getenv("WSYNC_NCCL_LIB");
    wsync_library_search_t search = {.used = 0};
    void *found;

    if (named != NULL && named[0] != '\0') {
        found = wsync_library_try(&search, named);
    } else {
        /* Two copies in one process would have settings and an order of their own. */
        found = dlopen(NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        for (size_t i = 0; i < path_count && found == NULL; i++) {
            found = wsync_library_try(&search, paths[i]);
        }
        if (found == NULL) {
            found = wsync_library_try(&search, NCCL_LIBRARY);
        }
    }
    if (found == NULL) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "dlopen",
                          "no NCCL (it is in the packages nvidia-nccl-cu12 and "
                          "nvidia-nccl-cu13): %s",
                          search.tried);
    }
    *library = found;
    return WSYNC_OK;
}

/* Fills in the entries whose symbol is `only`, or all (NULL). */
static wsync_status_t look_up(void *opened, const char *only, wsync_nccl_library_t *library,
                              wsync_error_t *err)
{
    for (size_t i = 0; i < ENTRY_COUNT; i++) {
        const entry_t *entry = &entries[i];
        void *address;

        if (only != NULL && strcmp(only, entry->symbol) != 0) {
            continue;
        }
        address = dlsym(opened, entry->symbol);
        if (address == NULL && library->version == 0) {
            return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "dlsym",
                              "no NCCL: %s is another library: it has no %s", library->path,
                              entry->symbol);
        }
        if (address == NULL) {
            return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "dlsym",
                              "no NCCL: %s (NCCL %d.%d.%d) has no %s, which NCCL %d.%d has",
                              library->path, library->version / 10000,
                              library->version % 10000 / 100, library->version % 100,
                              entry->symbol, entry->since / 10000,
                              entry->since % 10000 / 100);
        }
        /* ISO C does not convert the one kind of pointer to the other. */
        memcpy((char *)library + entry->offset, (const void *)&address, sizeof(address));
    }
    return WSYNC_OK;
}

/* The file that a symbol of the library is in. */
static const char *find_path(void *opened)
{
    const char *named = secure_getenv("WSYNC_NCCL_LIB");
    void *address = dlsym(opened, "ncclGetVersion");
    Dl_info info;

    if (address != NULL && dladdr(address, &info) != 0 && info.dli_fname != NULL) {
        return info.dli_fname;
    }
    return named != NULL && named[0] != '\0' ? named : NCCL_LIBRARY;
}

static wsync_status_t load(const char *const *paths, size_t path_count,
                           wsync_nccl_library_t *library, wsync_error_t *err)
{
    wsync_nccl_library_t made = {0};
    void *opened = NULL;
    wsync_nccl_result_t result;
    wsync_status_t status = open_library(paths, path_count, &opened, err);

    if (status != WSYNC_OK) {
        return status;
    }
    made.path = find_path(opened);
    status = look_up(opened, "ncclGetVersion", &made, err);
    if (status == WSYNC_OK) {
        status = look_up(opened, "ncclGetErrorString", &made, err);
    }
    if (made.get_version == NULL || made.get_error_string == NULL) {
        return status;
    }
    result = made.get_version(&made.version);
    if (result != WSYNC_NCCL_SUCCESS) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, result, "ncclGetVersion",
                          "no NCCL: %s: ncclGetVersion: %s (%d)", made.path,
                          made.get_error_string(result), result);
    }
    if (made.version < WSYNC_NCCL_MIN_VERSION) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "ncclGetVersion",
                          "no NCCL: %s is NCCL %d.%d.%d, wsync needs %d.%d or later",
                          made.path, made.version / 10000, made.version % 10000 / 100,
                          made.version % 100, WSYNC_NCCL_MIN_VERSION / 10000,
                          WSYNC_NCCL_MIN_VERSION % 10000 / 100);
    }
    status = look_up(opened, NULL, &made, err);
    if (status == WSYNC_OK) {
        *library = made;
    }
    return status;
}

wsync_status_t wsync_nccl_library(const char *const *paths, size_t path_count,
                                  const wsync_nccl_library_t **library, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    (void)pthread_mutex_lock(&table.mutex);
    if (!table.found) {
        status = load(paths, path_count, &table.library, err);
        table.found = status == WSYNC_OK;
    }
    (void)pthread_mutex_unlock(&table.mutex);
    if (status == WSYNC_OK) {
        *library = &table.library;
    }
    return status;
}

wsync_status_t wsync_nccl_check(const wsync_nccl_library_t *library,
                                wsync_nccl_result_t result, const char *call,
                                wsync_error_t *err, const char *format, ...)
{
    const wsync_status_t status =
        result == WSYNC_NCCL_REMOTE_ERROR ? WSYNC_ERR_CLOSED : WSYNC_ERR_DEVICE;
    char attempt[WSYNC_ERROR_MESSAGE_NBYTES / 4];
    const char *last;
    va_list arguments;

    if (result == WSYNC_NCCL_SUCCESS) {
        return WSYNC_OK;
    }
    if (err == NULL) {
        return status;
    }
    va_start(arguments, format);
    (void)vsnprintf(attempt, sizeof(attempt), format, arguments);
    va_end(arguments);
    last = library->get_last_error(NULL); /* of the process: it asks for no communicator */
    return wsync_fail(err, status, result, call, "%s: %s: %s (%d)%s%s", attempt, call,
                      library->get_error_string(result), result,
                      last != NULL && last[0] != '\0' ? ": " : "",
                      last != NULL ? last : "");
}
