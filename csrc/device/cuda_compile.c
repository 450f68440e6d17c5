/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_compile.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/checksum.h"
#include "device/cuda_compile_cache.h"
#include "device/library_search.h"

enum {
    NVRTC_SUCCESS = 0,
    MAX_ARCHITECTURES = 128,
    NAME_NBYTES = 128,
    OPTION_NBYTES = 48,
    MAX_LOG_NBYTES = 1024 * 1024,
    /* Of the log and of the places that were tried: what an error message has room for. */
    SHOWN_NBYTES = 512,
};

typedef struct nvrtc_program nvrtc_program_t;

/* NVRTC as wsync uses it; types and numbers are those of its stable C interface. */
typedef struct nvrtc {
    int (*version)(int *major, int *minor);
    const char *(*error_string)(int code);
    int (*architecture_count)(int *count);
    int (*architectures)(int *values);
    int (*create)(nvrtc_program_t **program, const char *source, const char *name,
                  int header_count, const char *const *headers, const char *const *names);
    int (*compile)(nvrtc_program_t *program, int count, const char *const *options);
    int (*destroy)(nvrtc_program_t **program);
    int (*log_nbytes)(nvrtc_program_t *program, size_t *nbytes);
    int (*log)(nvrtc_program_t *program, char *log);
    int (*cubin_nbytes)(nvrtc_program_t *program, size_t *nbytes);
    int (*cubin)(nvrtc_program_t *program, char *data);
    int (*ptx_nbytes)(nvrtc_program_t *program, size_t *nbytes);
    int (*ptx)(nvrtc_program_t *program, char *data);
    const void *inside; /* some address in the library */
} nvrtc_t;

/* What is compiled for: the device itself, or the newest that NVRTC knows below it. */
typedef struct target {
    char option[OPTION_NBYTES];
    char name[NAME_NBYTES]; /* of the file in the cache */
    bool exact;
} target_t;

static const char *const nvrtc_names[] = {
    "libnvrtc.so.13",
    "libnvrtc.so.12",
    "libnvrtc.so.11.2",
};
enum { NAME_COUNT = sizeof(nvrtc_names) / sizeof(nvrtc_names[0]) };

void wsync_kernel_image_fini(wsync_kernel_image_t *image)
{
    free(image->data);
    *image = (wsync_kernel_image_t){0};
}

/* Whether a library's name has a later major version than the driver, which then loads what
 * it compiles or not: of its own major version a driver loads whatever there is. */
static bool is_late(const wsync_compile_spec_t *spec, const char *path)
{
    static const char before[] = ".so.";
    const char *slash = strrchr(path, '/');
    const char *suffix = strstr(slash != NULL ? slash : path, before);

    return spec->driver > 0 && suffix != NULL &&
           strtol(suffix + strlen(before), NULL, 10) > spec->driver / 1000;
}

/* One that is loaded already (torch's own) is the one whose version suits the process. */
static void *find_library(const wsync_compile_spec_t *spec, bool late,
                          wsync_library_search_t *search)
{
    void *library = NULL;

    for (size_t i = 0; i < NAME_COUNT && library == NULL; i++) {
        if (is_late(spec, nvrtc_names[i]) == late) {
            library = dlopen(nvrtc_names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        }
    }
    for (size_t i = 0; i < spec->library_count && library == NULL; i++) {
        if (is_late(spec, spec->libraries[i]) == late) {
            library = wsync_library_try(search, spec->libraries[i]);
        }
    }
    for (size_t i = 0; i < NAME_COUNT && library == NULL; i++) {
        if (is_late(spec, nvrtc_names[i]) == late) {
            library = wsync_library_try(search, nvrtc_names[i]);
        }
    }
    return library;
}

/* The library stays open: it keeps threads and caches of its own. */
static wsync_status_t open_nvrtc(const wsync_compile_spec_t *spec, nvrtc_t *nvrtc,
                                 wsync_error_t *err)
{
    static const struct {
        const char *name;
        size_t offset;
    } entries[] = {
        {"nvrtcVersion", offsetof(nvrtc_t, version)},
        {"nvrtcGetErrorString", offsetof(nvrtc_t, error_string)},
        {"nvrtcGetNumSupportedArchs", offsetof(nvrtc_t, architecture_count)},
        {"nvrtcGetSupportedArchs", offsetof(nvrtc_t, architectures)},
        {"nvrtcCreateProgram", offsetof(nvrtc_t, create)},
        {"nvrtcCompileProgram", offsetof(nvrtc_t, compile)},
        {"nvrtcDestroyProgram", offsetof(nvrtc_t, destroy)},
        {"nvrtcGetProgramLogSize", offsetof(nvrtc_t, log_nbytes)},
        {"nvrtcGetProgramLog", offsetof(nvrtc_t, log)},
        {"nvrtcGetCUBINSize", offsetof(nvrtc_t, cubin_nbytes)},
        {"nvrtcGetCUBIN", offsetof(nvrtc_t, cubin)},
        {"nvrtcGetPTXSize", offsetof(nvrtc_t, ptx_nbytes)},
        {"nvrtcGetPTX", offsetof(nvrtc_t, ptx)},
    };
    wsync_library_search_t search = {.used = 0};
    void *library = find_library(spec, false, &search);

    if (library == NULL) {
        library = find_library(spec, true, &search);
    }
    if (library == NULL) {
        (void)wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "nvrtc",
                         "no NVRTC to compile the kernels with (it is in the package "
                         "nvidia-cuda-nvrtc): %s",
                         search.tried);
        return WSYNC_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        void *symbol = dlsym(library, entries[i].name);

        if (symbol == NULL) {
            (void)wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "nvrtc",
                             "NVRTC is older than CUDA 11.2, or another library: it has no "
                             "%s",
                             entries[i].name);
            return WSYNC_ERR_UNSUPPORTED;
        }
        memcpy((char *)nvrtc + entries[i].offset, (const void *)&symbol, sizeof(symbol));
        nvrtc->inside = symbol;
    }
    return WSYNC_OK;
}

static wsync_status_t fail_nvrtc(const nvrtc_t *nvrtc, const char *call, int code,
                                 const char *log, wsync_error_t *err)
{
    return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, code, "nvrtc", "%s: %s (%d)%s%.*s", call,
                      nvrtc->error_string(code), code, log[0] != '\0' ? ": " : "",
                      (int)SHOWN_NBYTES, log);
}

/* The newest architecture that NVRTC knows and the device runs; 0 if there is none. */
static wsync_status_t choose_architecture(const nvrtc_t *nvrtc, unsigned capability,
                                          unsigned *architecture, wsync_error_t *err)
{
    int values[MAX_ARCHITECTURES];
    int count = 0;
    int code = nvrtc->architecture_count(&count);
    unsigned best = 0;

    if (code == NVRTC_SUCCESS && count > 0 && count <= MAX_ARCHITECTURES) {
        code = nvrtc->architectures(values);
    }
    if (code != NVRTC_SUCCESS) {
        return fail_nvrtc(nvrtc, "nvrtcGetSupportedArchs", code, "", err);
    }
    for (int i = 0; i < count && count <= MAX_ARCHITECTURES; i++) {
        if (values[i] > (int)best && values[i] <= (int)capability) {
            best = (unsigned)values[i];
        }
    }
    *architecture = best;
    return WSYNC_OK;
}

/* Everything that the result depends on is in the file's name. */
static wsync_status_t choose_target(const nvrtc_t *nvrtc, unsigned capability,
                                    target_t *target, wsync_error_t *err)
{
    uint64_t sums[WSYNC_KERNEL_FILES];
    unsigned architecture = 0;
    int major = 0;
    int minor = 0;
    const int code = nvrtc->version(&major, &minor);
    wsync_status_t status;

    if (code != NVRTC_SUCCESS) {
        return fail_nvrtc(nvrtc, "nvrtcVersion", code, "", err);
    }
    for (size_t i = 0; i < WSYNC_KERNEL_FILES; i++) {
        const char *text = wsync_kernel_files[i].text;

        sums[i] = wsync_checksum(text, strlen(text));
    }
    status = choose_architecture(nvrtc, capability, &architecture, err);
    if (status != WSYNC_OK) {
        return status;
    }
    if (architecture == 0) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "nvrtc",
                          "NVRTC %d.%d compiles for no device as old as compute capability "
                          "%u.%u",
                          major, minor, capability / 10, capability % 10);
    }
    target->exact = architecture == capability;
    (void)snprintf(target->option, sizeof(target->option), "--gpu-architecture=%s_%u",
                   target->exact ? "sm" : "compute", architecture);
    (void)snprintf(target->name, sizeof(target->name),
                   "wsync-%016" PRIx64 "-%s-nvrtc%d.%d.bin",
                   wsync_checksum(sums, sizeof(sums)),
                   target->option + strlen("--gpu-architecture="), major, minor);
    return WSYNC_OK;
}

static wsync_status_t fail_compile(const nvrtc_t *nvrtc, nvrtc_program_t *program, int code,
                                   wsync_error_t *err)
{
    size_t nbytes = 0;
    char *log = NULL;
    wsync_status_t status;

    if (nvrtc->log_nbytes(program, &nbytes) == NVRTC_SUCCESS && nbytes > 0 &&
        nbytes <= MAX_LOG_NBYTES) {
        log = calloc(1, nbytes + 1);
    }
    if (log != NULL) {
        (void)nvrtc->log(program, log);
    }
    status = fail_nvrtc(nvrtc, "the kernels do not compile: nvrtcCompileProgram", code,
                        log != NULL ? log : "", err);
    free(log);
    return status;
}

/* Machine code for the device itself, PTX for one that is newer than NVRTC. */
static wsync_status_t take_image(const nvrtc_t *nvrtc, nvrtc_program_t *program,
                                 bool machine_code, wsync_kernel_image_t *image,
                                 wsync_error_t *err)
{
    size_t nbytes = 0;
    int code = machine_code ? nvrtc->cubin_nbytes(program, &nbytes)
                            : nvrtc->ptx_nbytes(program, &nbytes);
    char *data;

    if (code != NVRTC_SUCCESS || nbytes == 0) {
        return fail_nvrtc(nvrtc, machine_code ? "nvrtcGetCUBINSize" : "nvrtcGetPTXSize",
                          code, "", err);
    }
    data = malloc(nbytes);
    if (data == NULL) {
        return wsync_no_memory(err, "nvrtc");
    }
    code = machine_code ? nvrtc->cubin(program, data) : nvrtc->ptx(program, data);
    if (code != NVRTC_SUCCESS) {
        free(data);
        return fail_nvrtc(nvrtc, machine_code ? "nvrtcGetCUBIN" : "nvrtcGetPTX", code, "",
                          err);
    }
    *image = (wsync_kernel_image_t){.data = data, .nbytes = nbytes};
    return WSYNC_OK;
}

/* NVRTC opens a second library by its bare name, which lies beside it in a wheel but on no
 * search path: one that is loaded already is found.  If there is none, NVRTC says so. */
static void load_builtins(const nvrtc_t *nvrtc)
{
    char path[PATH_MAX];
    const char *slash;
    Dl_info info;
    int major = 0;
    int minor = 0;

    if (nvrtc->version(&major, &minor) != NVRTC_SUCCESS ||
        dladdr(nvrtc->inside, &info) == 0 || info.dli_fname == NULL) {
        return;
    }
    slash = strrchr(info.dli_fname, '/');
    if (slash != NULL && snprintf(path, sizeof(path), "%.*s/libnvrtc-builtins.so.%d.%d",
                                  (int)(slash - info.dli_fname), info.dli_fname, major,
                                  minor) < (int)sizeof(path)) {
        (void)dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
}

static wsync_status_t compile(const nvrtc_t *nvrtc, const target_t *target,
                              wsync_kernel_image_t *image, wsync_error_t *err)
{
    const char *headers[WSYNC_KERNEL_FILES];
    const char *names[WSYNC_KERNEL_FILES];
    const char *const options[] = {target->option};
    nvrtc_program_t *program = NULL;
    wsync_status_t status;
    int code;

    load_builtins(nvrtc);
    for (size_t i = 0; i < WSYNC_KERNEL_FILES; i++) {
        headers[i] = wsync_kernel_files[i].text;
        names[i] = wsync_kernel_files[i].name;
    }
    code = nvrtc->create(&program, headers[0], names[0], WSYNC_KERNEL_FILES - 1,
                         headers + 1, names + 1);
    if (code != NVRTC_SUCCESS) {
        return fail_nvrtc(nvrtc, "nvrtcCreateProgram", code, "", err);
    }
    code = nvrtc->compile(program, 1, options);
    status = code == NVRTC_SUCCESS ? take_image(nvrtc, program, target->exact, image, err)
                                   : fail_compile(nvrtc, program, code, err);
    (void)nvrtc->destroy(&program);
    return status;
}

wsync_status_t wsync_cuda_compile(const wsync_compile_spec_t *spec,
                                  wsync_kernel_image_t *image, wsync_error_t *err)
{
    wsync_kernel_image_t made = {0};
    nvrtc_t nvrtc = {0};
    target_t target = {.exact = false};
    wsync_status_t status = open_nvrtc(spec, &nvrtc, err);

    if (status == WSYNC_OK) {
        status = choose_target(&nvrtc, spec->capability, &target, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    if (spec->cache != NULL &&
        wsync_cache_load(spec->cache, target.name, &made.data, &made.nbytes)) {
        made.cached = true;
    } else {
        status = compile(&nvrtc, &target, &made, err);
        if (status != WSYNC_OK) {
            return status;
        }
        if (spec->cache != NULL) {
            (void)wsync_cache_store(spec->cache, target.name, made.data, made.nbytes);
        }
    }
    *image = made;
    return WSYNC_OK;
}
