/* SPDX-License-Identifier: Apache-2.0
 * What the stand-ins for the driver and for NCCL do alike around a call: lines in files,
 * failures that tests plan, numbers from the environment. */
#ifndef WSYNC_TESTS_FAKE_CALLS_H
#define WSYNC_TESTS_FAKE_CALLS_H

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FAKE_NAME_NBYTES = 64, FAKE_TEXT_NBYTES = 384 };

/* Appends "PREFIX TEXT\n" at once; fd -1: nowhere. */
static inline void fake_write_line(int fd, const char *prefix, const char *format,
                                   va_list arguments)
{
    char line[FAKE_TEXT_NBYTES + 2 * FAKE_NAME_NBYTES];
    int length;

    if (fd < 0) {
        return;
    }
    length = snprintf(line, sizeof(line), "%s ", prefix);
    length +=
        vsnprintf(line + length, sizeof(line) - (size_t)length - 2, format, arguments);
    length = length > (int)sizeof(line) - 2 ? (int)sizeof(line) - 2 : length;
    line[length] = '\n';
    if (write(fd, line, (size_t)length + 1) < 0) {
        return; /* a log that is full loses lines */
    }
}

/* The file that a variable names, to append to; -1 for none. */
static inline int fake_open_log(const char *variable)
{
    const char *path = getenv(variable);

    return path == NULL ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static inline size_t fake_read_number(const char *variable, size_t otherwise)
{
    const char *text = getenv(variable);

    return text != NULL && text[0] != '\0' ? strtoull(text, NULL, 10) : otherwise;
}

/* A call that is to fail. */
typedef struct fake_failure {
    pthread_mutex_t mutex;
    char call[FAKE_NAME_NBYTES]; /* "*": any */
    long left;                   /* calls until then; negative: none fails */
    int code;
    bool lasts;      /* and so does every call after it */
    const char *hit; /* the call, once it has failed */
} fake_failure_t;

#define FAKE_FAILURE_INIT {.mutex = PTHREAD_MUTEX_INITIALIZER, .left = -1}

static inline void fake_failure_plan(fake_failure_t *failure, const char *call, long k,
                                     int code, bool lasts)
{
    (void)pthread_mutex_lock(&failure->mutex);
    (void)snprintf(failure->call, sizeof(failure->call), "%s", call);
    failure->left = k;
    failure->code = code;
    failure->lasts = lasts;
    failure->hit = NULL;
    (void)pthread_mutex_unlock(&failure->mutex);
}

/* As a variable has it: CALL:K:CODE, or, of the driver alone, CALL:K:CODE:1 of one that
 * lasts. */
static inline void fake_failure_read(fake_failure_t *failure, const char *variable)
{
    const char *text = getenv(variable);
    char call[FAKE_NAME_NBYTES] = "";
    long k = -1;
    int code = 0;
    int lasts = 0;

    if (text != NULL && sscanf(text, "%63[^:]:%ld:%d:%d", call, &k, &code, &lasts) >= 3) {
        fake_failure_plan(failure, call, k, code, lasts != 0);
    }
}

/* The code that a call fails with now, or 0; whether that lasts. */
static inline int fake_failure_strike(fake_failure_t *failure, const char *call,
                                      bool *lasts)
{
    int code = 0;

    *lasts = false;
    (void)pthread_mutex_lock(&failure->mutex);
    if (failure->left >= 0 &&
        (strcmp(failure->call, "*") == 0 || strcmp(failure->call, call) == 0) &&
        failure->left-- == 0) {
        failure->hit = call;
        code = failure->code;
        *lasts = failure->lasts;
    }
    (void)pthread_mutex_unlock(&failure->mutex);
    return code;
}

static inline const char *fake_failure_hit(fake_failure_t *failure)
{
    const char *hit;

    (void)pthread_mutex_lock(&failure->mutex);
    hit = failure->hit;
    (void)pthread_mutex_unlock(&failure->mutex);
    return hit;
}

#endif
