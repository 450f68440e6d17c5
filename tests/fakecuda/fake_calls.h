/* SPDX-License-Identifier: Apache-2.0
 * What the stand-ins for the driver and for NCCL do alike: lines in files, numbers from the
 * environment. */
#ifndef WSYNC_TESTS_FAKE_CALLS_H
#define WSYNC_TESTS_FAKE_CALLS_H

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { FAKE_NAME_NBYTES = 64, FAKE_TEXT_NBYTES = 384 };

/* Appends "PID TEXT\n" at once; fd -1: nowhere. */
static inline void fake_write_line(int fd, const char *text)
{
    char line[FAKE_TEXT_NBYTES + FAKE_NAME_NBYTES];
    const int length = snprintf(line, sizeof(line), "%ld %s\n", (long)getpid(), text);

    if (fd >= 0 && write(fd, line, (size_t)length) < 0) {
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

#endif
