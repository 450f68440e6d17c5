/* SPDX-License-Identifier: Apache-2.0
 * A test file is a program: TEST(name) { ... } blocks, and this header once.  `program
 * name` runs one test in this process, `program` runs each in a process of its own.  The
 * exit code is 0 passed, 1 failed. */
#ifndef WSYNC_TESTS_HARNESS_H
#define WSYNC_TESTS_HARNESS_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/status.h"

enum { HARNESS_FAILED = 1, HARNESS_MAX_TESTS = 256 };

typedef void (*harness_test_func_t)(void);

static struct {
    const char *name;
    harness_test_func_t run;
} harness_tests[HARNESS_MAX_TESTS];
static int harness_test_count;

#define TEST(test)                                               \
    static void test_##test(void);                               \
    __attribute__((constructor)) static void add_##test(void)    \
    {                                                            \
        if (harness_test_count < HARNESS_MAX_TESTS) {            \
            harness_tests[harness_test_count].name = #test;      \
            harness_tests[harness_test_count].run = test_##test; \
        }                                                        \
        harness_test_count++;                                    \
    }                                                            \
    static void test_##test(void)

#define FAIL(...)                                             \
    do {                                                      \
        (void)fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
        (void)fprintf(stderr, __VA_ARGS__);                   \
        (void)fputc('\n', stderr);                            \
        _exit(HARNESS_FAILED);                                \
    } while (0)

#define CHECK(condition)                                 \
    do {                                                 \
        if (!(condition)) {                              \
            FAIL("CHECK(%s) does not hold", #condition); \
        }                                                \
    } while (0)

/* Integers of any type and sign; both are printed. */
#define CHECK_EQ(a, b)                                                                  \
    do {                                                                                \
        const intmax_t left_ = (intmax_t)(a);                                           \
        const intmax_t right_ = (intmax_t)(b);                                          \
        if (left_ != right_) {                                                          \
            FAIL("CHECK_EQ(%s, %s): %" PRIdMAX " != %" PRIdMAX, #a, #b, left_, right_); \
        }                                                                               \
    } while (0)

#define CHECK_STR(a, b)                                                     \
    do {                                                                    \
        const char *const left_ = (a);                                      \
        const char *const right_ = (b);                                     \
        if (strcmp(left_, right_) != 0) {                                   \
            FAIL("CHECK_STR(%s, %s): '%s' != '%s'", #a, #b, left_, right_); \
        }                                                                   \
    } while (0)

/* `a` must contain `part`. */
#define CHECK_HAS(a, part)                                                        \
    do {                                                                          \
        const char *const left_ = (a);                                            \
        const char *const right_ = (part);                                        \
        if (strstr(left_, right_) == NULL) {                                      \
            FAIL("CHECK_HAS(%s, %s): no '%s' in '%s'", #a, #part, right_, left_); \
        }                                                                         \
    } while (0)

/* A call that must succeed and that fills the wsync_error_t `err`. */
#define CHECK_OK(call, err)                                                       \
    do {                                                                          \
        const wsync_status_t status_ = (call);                                    \
        if (status_ != WSYNC_OK) {                                                \
            FAIL("%s: %s: %s", #call, wsync_status_text(status_), (err).message); \
        }                                                                         \
    } while (0)

/* Runs one test in a child; returns its exit code. */
static int harness_fork(int index)
{
    int status = 0;
    const pid_t child = fork();

    if (child == 0) {
        harness_tests[index].run();
        exit(0); /* not _exit: the leak check runs at exit */
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) {
        return HARNESS_FAILED;
    }
    return WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
    int failed = 0;

    if (harness_test_count == 0 || harness_test_count > HARNESS_MAX_TESTS) {
        FAIL("%d tests in %s", harness_test_count, argv[0]);
    }
    for (int i = 0; i < harness_test_count && argc == 1; i++) {
        const int code = harness_fork(i);

        (void)printf("%-8s %s\n", code == 0 ? "passed" : "FAILED", harness_tests[i].name);
        (void)fflush(stdout);
        failed += code != 0;
    }
    if (argc == 1) {
        (void)printf("%d tests, %d failed\n", harness_test_count, failed);
        return failed == 0 ? 0 : HARNESS_FAILED;
    }
    for (int i = 0; i < harness_test_count; i++) {
        if (strcmp(argv[1], harness_tests[i].name) == 0) {
            harness_tests[i].run();
            return 0;
        }
    }
    FAIL("no test named '%s' in %s", argv[1], argv[0]);
}

#endif
