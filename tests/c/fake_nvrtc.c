/* SPDX-License-Identifier: Apache-2.0
 * A stand-in for libnvrtc: its machine code is a text that names what it was made from.  A
 * test reaches the two variables through dlsym. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, COMPILATION = 6, PROGRAM_NBYTES = 4096 };

EXPORT extern int fake_nvrtc_compiled; /* calls of nvrtcCompileProgram */
EXPORT extern int fake_nvrtc_fails;    /* nothing compiles */
int fake_nvrtc_compiled;
int fake_nvrtc_fails;

typedef struct program {
    char source[64];
    char option[64];
} program_t;

EXPORT int nvrtcVersion(int *major, int *minor);
EXPORT const char *nvrtcGetErrorString(int code);
EXPORT int nvrtcGetNumSupportedArchs(int *count);
EXPORT int nvrtcGetSupportedArchs(int *values);
EXPORT int nvrtcCreateProgram(program_t **program, const char *source, const char *name,
                              int header_count, const char *const *headers,
                              const char *const *names);
EXPORT int nvrtcCompileProgram(program_t *program, int count, const char *const *options);
EXPORT int nvrtcDestroyProgram(program_t **program);
EXPORT int nvrtcGetProgramLogSize(program_t *program, size_t *nbytes);
EXPORT int nvrtcGetProgramLog(program_t *program, char *log);
EXPORT int nvrtcGetCUBINSize(program_t *program, size_t *nbytes);
EXPORT int nvrtcGetCUBIN(program_t *program, char *data);
EXPORT int nvrtcGetPTXSize(program_t *program, size_t *nbytes);
EXPORT int nvrtcGetPTX(program_t *program, char *data);

static const int known[] = {75, 80, 90, 100, 120};
static const char complaint[] = "kernels.cu(7): error: planted";

/* One program at a time in one process: static, so that the caller's leaks alone show. */
static program_t the_program;

int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

const char *nvrtcGetErrorString(int code)
{
    return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

int nvrtcGetNumSupportedArchs(int *count)
{
    *count = (int)(sizeof(known) / sizeof(known[0]));
    return SUCCESS;
}

int nvrtcGetSupportedArchs(int *values)
{
    memcpy(values, known, sizeof(known));
    return SUCCESS;
}

int nvrtcCreateProgram(program_t **program, const char *source, const char *name,
                       int header_count, const char *const *headers,
                       const char *const *names)
{
    size_t nbytes = 0;

    if (strstr(source, "wsync_copy") == NULL || strcmp(name, "device/kernels.cu") != 0 ||
        header_count < 1 || strstr(headers[0], "wsync_segment_t") == NULL) {
        return 3;
    }
    for (int i = 0; i < header_count; i++) {
        int used = strstr(source, names[i]) != NULL;

        for (int k = 0; k < header_count; k++) {
            used += strstr(headers[k], names[i]) != NULL;
        }
        if (used == 0) {
            return 3;
        }
        nbytes += strlen(headers[i]);
    }
    (void)snprintf(the_program.source, sizeof(the_program.source), "%zu+%zu",
                   strlen(source), nbytes);
    *program = &the_program;
    return SUCCESS;
}

int nvrtcCompileProgram(program_t *program, int count, const char *const *options)
{
    fake_nvrtc_compiled++;
    (void)snprintf(program->option, sizeof(program->option), "%s", options[0]);
    return count == 1 && fake_nvrtc_fails == 0 ? SUCCESS : COMPILATION;
}

int nvrtcDestroyProgram(program_t **program)
{
    *program = NULL;
    return SUCCESS;
}

int nvrtcGetProgramLogSize(program_t *program, size_t *nbytes)
{
    (void)program;
    *nbytes = sizeof(complaint);
    return SUCCESS;
}

int nvrtcGetProgramLog(program_t *program, char *log)
{
    (void)program;
    memcpy(log, complaint, sizeof(complaint));
    return SUCCESS;
}

static int give(const program_t *program, const char *kind, char *data)
{
    memset(data, '.', PROGRAM_NBYTES);
    (void)snprintf(data, PROGRAM_NBYTES, "%s of %s with %s", kind, program->source,
                   program->option);
    return SUCCESS;
}

int nvrtcGetCUBINSize(program_t *program, size_t *nbytes)
{
    (void)program;
    *nbytes = PROGRAM_NBYTES;
    return SUCCESS;
}

int nvrtcGetCUBIN(program_t *program, char *data)
{
    return give(program, "cubin", data);
}

int nvrtcGetPTXSize(program_t *program, size_t *nbytes)
{
    return nvrtcGetCUBINSize(program, nbytes);
}

int nvrtcGetPTX(program_t *program, char *data)
{
    return give(program, "ptx", data);
}
