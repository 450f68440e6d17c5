/* SPDX-License-Identifier: Apache-2.0
 * Initialisation, devices, contexts, the log, planned failures. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"
#include "fake_calls.h"

enum { DEFAULT_VERSION = 12080, MAX_PUSHED = 16 };

fake_state_t fake = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local struct wsync_cu_context *pushed[MAX_PUSHED];
static _Thread_local int pushed_count;
static _Thread_local wsync_cu_result_t planned; /* for fake_leave */

static atomic_int log_fd = -1;
static atomic_int misuse_fd = -1;
static atomic_bool ended; /* the process runs what it has for its end */
/* The call that is to fail; locked. */
static struct {
    char call[FAKE_NAME_NBYTES]; /* "*": any */
    long left;                   /* calls until then; negative: none fails */
    int code;
    bool lasts;      /* and so does every call after it */
    const char *hit; /* the call, once it has failed */
} failure = {.left = -1};
static struct {
    long left; /* kernels that run until one faults; negative: none does */
    int code;
} fault = {.left = -1};

EXPORT void fakecuda_fail(const char *call, long k, int code);
EXPORT void fakecuda_lose(const char *call, long k, int code);
EXPORT const char *fakecuda_failed(void);
EXPORT int fakecuda_current(uint8_t *uuid);
EXPORT void fakecuda_census(fakecuda_census_t *census);
EXPORT wsync_cu_result_t cuInit(unsigned flags);

/* --- log and planned failures --------------------------------------------------------- */

void fake_log(const char *format, ...)
{
    char text[FAKE_TEXT_NBYTES];
    va_list arguments;

    if (atomic_load(&log_fd) < 0) {
        return;
    }
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fake_write_line(atomic_load(&log_fd), text);
}

wsync_cu_result_t fake_refuse(wsync_cu_result_t code, const char *format, ...)
{
    char text[FAKE_TEXT_NBYTES];
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fake_log("refused %d: %s", code, text);
    if (code == WSYNC_CU_ILLEGAL_STATE || code == WSYNC_CU_ILLEGAL_ADDRESS ||
        code == WSYNC_CU_INVALID_HANDLE || code == WSYNC_CU_DEINITIALIZED ||
        code == WSYNC_CU_NOT_PERMITTED) {
        fake_write_line(atomic_load(&misuse_fd), text);
    }
    return code;
}

static void plan(const char *call, long k, int code, bool lasts)
{
    fake_lock();
    (void)snprintf(failure.call, sizeof(failure.call), "%s", call);
    failure.left = k;
    failure.code = code;
    failure.lasts = lasts;
    failure.hit = NULL;
    fake_unlock();
}

void fakecuda_fail(const char *call, long k, int code)
{
    plan(call, k, code, false);
}

void fakecuda_lose(const char *call, long k, int code)
{
    plan(call, k, code, true);
}

bool fake_launch_faults(void)
{
    bool faults;

    fake_lock();
    faults = fault.left >= 0 && fault.left-- == 0;
    fake_unlock();
    if (faults) {
        atomic_store(&fake.lost, fault.code);
        fake_log("a kernel faults");
    }
    return faults;
}

const char *fakecuda_failed(void)
{
    const char *hit;

    fake_lock();
    hit = failure.hit;
    fake_unlock();
    return hit;
}

static wsync_cu_result_t strike(const char *call)
{
    wsync_cu_result_t code = WSYNC_CU_SUCCESS;
    bool lost;

    fake_lock();
    if (failure.left >= 0 &&
        (strcmp(failure.call, "*") == 0 || strcmp(failure.call, call) == 0) &&
        failure.left-- == 0) {
        failure.hit = call;
        code = failure.code;
    }
    lost = code != WSYNC_CU_SUCCESS && failure.lasts;
    fake_unlock();
    if (code != WSYNC_CU_SUCCESS) {
        fake_log("failed %s %d", call, code);
    }
    if (lost) {
        fake_streams_lose(code);
    }
    return code;
}

static wsync_cu_result_t check_process(const char *call)
{
    fake_log("%s", call);
    if (fake.pid == 0) {
        return fake_refuse(WSYNC_CU_NOT_INITIALIZED, "%s before cuInit", call);
    }
    if (fake.pid != getpid()) {
        return fake_refuse(WSYNC_CU_NOT_INITIALIZED, "%s in a fork", call);
    }
    if (atomic_load(&ended)) {
        return fake_refuse(WSYNC_CU_DEINITIALIZED, "%s while the process ends", call);
    }
    return atomic_load(&fake.lost);
}

wsync_cu_result_t fake_enter(const char *call)
{
    const wsync_cu_result_t code = check_process(call);

    return code != WSYNC_CU_SUCCESS ? code : strike(call);
}

static wsync_cu_result_t find_context(const char *call, struct wsync_cu_context **context)
{
    if (pushed_count == 0) {
        return fake_refuse(WSYNC_CU_INVALID_CONTEXT, "%s without a context", call);
    }
    *context = pushed[pushed_count - 1];
    return WSYNC_CU_SUCCESS;
}

wsync_cu_result_t fake_enter_context(const char *call, struct wsync_cu_context **context)
{
    const wsync_cu_result_t code = fake_enter(call);

    return code != WSYNC_CU_SUCCESS ? code : find_context(call, context);
}

wsync_cu_result_t fake_enter_return(const char *call, struct wsync_cu_context **context)
{
    const wsync_cu_result_t code = check_process(call);

    planned = code == WSYNC_CU_SUCCESS ? strike(call) : WSYNC_CU_SUCCESS;
    return code != WSYNC_CU_SUCCESS || context == NULL ? code : find_context(call, context);
}

wsync_cu_result_t fake_leave(wsync_cu_result_t code)
{
    return code != WSYNC_CU_SUCCESS ? code : planned;
}

void fake_lock(void)
{
    (void)pthread_mutex_lock(&fake.mutex);
}

void fake_unlock(void)
{
    (void)pthread_mutex_unlock(&fake.mutex);
}

/* --- initialisation, devices ---------------------------------------------------------- */

/* What is to fail, as the variables have it. */
static void read_plans(void)
{
    const char *fails = getenv("WSYNC_FAKE_CUDA_FAIL");
    const char *faults = getenv("WSYNC_FAKE_CUDA_FAULT");
    char call[FAKE_NAME_NBYTES];
    long k;
    int code;
    int lasts = 0;

    if (fails != NULL && sscanf(fails, "%63[^:]:%ld:%d:%d", call, &k, &code, &lasts) >= 3) {
        plan(call, k, code, lasts != 0);
    }
    if (faults != NULL && sscanf(faults, "%ld:%d", &k, &code) == 2) {
        fault.left = k;
        fault.code = code;
    }
}

static void open_log(const char *name, atomic_int *fd)
{
    if (atomic_load(fd) < 0) {
        atomic_store(fd, fake_open_log(name));
    }
}

/* The driver's own end, which comes with that of the process. */
static void end(void)
{
    atomic_store(&ended, true);
}

wsync_cu_result_t fake_init(unsigned flags)
{
    const char *text = getenv("WSYNC_FAKE_CUDA_LACKS");
    wsync_cu_result_t code;

    open_log("WSYNC_FAKE_CUDA_LOG", &log_fd);
    open_log("WSYNC_FAKE_CUDA_MISUSE", &misuse_fd);
    fake_log("cuInit");
    if (fake.pid != 0 && fake.pid != getpid()) {
        return fake_refuse(WSYNC_CU_NOT_INITIALIZED, "cuInit in a fork");
    }
    if (fake.pid == 0) {
        read_plans();
    }
    code = strike("cuInit");
    if (code != WSYNC_CU_SUCCESS || flags != 0) {
        return code != WSYNC_CU_SUCCESS ? code : WSYNC_CU_INVALID_VALUE;
    }
    fake_lock();
    if (fake.pid == 0) {
        fake.device_count = (int)fake_read_number("WSYNC_FAKE_CUDA_DEVICES", 1);
        fake.device_count =
            fake.device_count > FAKE_MAX_DEVICES ? FAKE_MAX_DEVICES : fake.device_count;
        fake.first = (int)fake_read_number("WSYNC_FAKE_CUDA_FIRST", 0);
        fake.memory = fake_read_number("WSYNC_FAKE_CUDA_MEMORY", (size_t)1 << 30);
        fake.delay_us = (unsigned)fake_read_number("WSYNC_FAKE_CUDA_DELAY_US", 100);
        fake.no_peers = fake_read_number("WSYNC_FAKE_CUDA_PEERS", 1) == 0;
        fake.mps = fake_read_number("WSYNC_FAKE_CUDA_MPS", 0) != 0;
        (void)snprintf(fake.lacks, sizeof(fake.lacks), ",%s,", text != NULL ? text : "");
        fake.pageable = fake_read_number("WSYNC_FAKE_CUDA_PAGEABLE", 0) != 0;
        fake.moving = fake_read_number("WSYNC_FAKE_CUDA_PAGEABLE", 0) == 2;
        fake.reserved = fake_read_number("WSYNC_FAKE_CUDA_RESERVED", 0) != 0;
        fake.sizes = fake_read_number("WSYNC_FAKE_CUDA_SIZES", 0) != 0;
        fake.connections = fake_read_number("WSYNC_FAKE_CUDA_CONNECTIONS", 0);
        fake.priorities =
            fake_read_number("WSYNC_FAKE_CUDA_PRIORITIES", 0) == 1 ? 1 : FAKE_PRIORITIES;
        fake.seed = 1;
        for (int i = 0; i < fake.device_count; i++) {
            fake.contexts[i].device = i;
        }
        fake.next_handle = 1;
        fake.pid = getpid();
        (void)atexit(end);
    }
    fake_unlock();
    return fake.device_count > 0 ? WSYNC_CU_SUCCESS : WSYNC_CU_NO_DEVICE;
}

wsync_cu_result_t cuInit(unsigned flags)
{
    return fake_init(flags);
}

int fake_version(void)
{
    return (int)fake_read_number("WSYNC_FAKE_CUDA_VERSION", DEFAULT_VERSION);
}

wsync_cu_result_t fake_driver_get_version(int *version)
{
    *version = fake_version();
    return WSYNC_CU_SUCCESS;
}

wsync_cu_result_t fake_get_error_name(wsync_cu_result_t code, const char **text)
{
    *text = code == WSYNC_CU_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return WSYNC_CU_SUCCESS;
}

wsync_cu_result_t fake_get_error_string(wsync_cu_result_t code, const char **text)
{
    *text = code == WSYNC_CU_OUT_OF_MEMORY ? "out of memory" : "the fake driver refuses";
    return WSYNC_CU_SUCCESS;
}

wsync_cu_result_t fake_device_get_count(int *count)
{
    const wsync_cu_result_t code = fake_enter("cuDeviceGetCount");

    *count = fake.device_count;
    return code;
}

wsync_cu_result_t fake_device_can_access(int *can, wsync_cu_device_t device,
                                         wsync_cu_device_t peer)
{
    const wsync_cu_result_t code = fake_enter("cuDeviceCanAccessPeer");

    *can = device != peer && !fake.no_peers;
    return code;
}

wsync_cu_result_t fake_device_get(wsync_cu_device_t *device, int ordinal)
{
    const wsync_cu_result_t code = fake_enter("cuDeviceGet");

    *device = ordinal;
    return code == WSYNC_CU_SUCCESS && (ordinal < 0 || ordinal >= fake.device_count)
               ? WSYNC_CU_INVALID_DEVICE
               : code;
}

wsync_cu_result_t fake_device_get_name(char *name, int nbytes, wsync_cu_device_t device)
{
    const wsync_cu_result_t code = fake_enter("cuDeviceGetName");

    (void)snprintf(name, (size_t)nbytes, "Fake GPU %d", fake.first + device);
    return code;
}

static void make_uuid(uint8_t *uuid, int device)
{
    memset(uuid, 0xfa, sizeof(wsync_cu_uuid_t));
    uuid[15] = (uint8_t)(fake.first + device);
}

int fakecuda_current(uint8_t *uuid)
{
    struct wsync_cu_context *context = NULL;
    const wsync_cu_result_t code = find_context("fakecuda_current", &context);

    if (code == WSYNC_CU_SUCCESS) {
        make_uuid(uuid, context->device);
    }
    return code;
}

wsync_cu_result_t fake_device_get_uuid(wsync_cu_uuid_t *uuid, wsync_cu_device_t device)
{
    const wsync_cu_result_t code = fake_enter("cuDeviceGetUuid");

    make_uuid(uuid->bytes, device);
    return code;
}

bool fake_lacks(int attribute)
{
    char number[16];

    (void)snprintf(number, sizeof(number), ",%d,", attribute);
    return strstr(fake.lacks, number) != NULL;
}

wsync_cu_result_t fake_device_get_attribute(int *value, int attribute,
                                            wsync_cu_device_t device)
{
    const wsync_cu_result_t code = fake_enter("cuDeviceGetAttribute");

    (void)device;
    *value = fake_lacks(attribute)                         ? 0
             : attribute == WSYNC_CU_ATTRIBUTE_PROCESSORS  ? 4
             : attribute == WSYNC_CU_ATTRIBUTE_MAJOR       ? 9
             : attribute == WSYNC_CU_ATTRIBUTE_MINOR       ? 0
             : attribute == WSYNC_CU_ATTRIBUTE_MPS         ? fake.mps
             : attribute == WSYNC_CU_ATTRIBUTE_PAGEABLE    ? fake.pageable
             : attribute == WSYNC_CU_ATTRIBUTE_HOST_TABLES ? fake.pageable && !fake.moving
                                                           : 1;
    return code;
}

wsync_cu_result_t fake_device_total_mem(size_t *nbytes, wsync_cu_device_t device)
{
    const wsync_cu_result_t code = fake_enter("cuDeviceTotalMem");

    (void)device;
    *nbytes = fake.memory;
    return code;
}

/* --- contexts ------------------------------------------------------------------------- */

wsync_cu_result_t fake_primary_retain(wsync_cu_context_t *context, wsync_cu_device_t device)
{
    const wsync_cu_result_t code = fake_enter("cuDevicePrimaryCtxRetain");

    if (code == WSYNC_CU_SUCCESS) {
        *context = &fake.contexts[device];
    }
    return code;
}

wsync_cu_result_t fake_primary_release(wsync_cu_device_t device)
{
    (void)device;
    return fake_enter("cuDevicePrimaryCtxRelease");
}

wsync_cu_result_t fake_context_push(wsync_cu_context_t context)
{
    const wsync_cu_result_t code = fake_enter("cuCtxPushCurrent");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    if (context == NULL || pushed_count == MAX_PUSHED) {
        return WSYNC_CU_INVALID_CONTEXT;
    }
    pushed[pushed_count++] = context;
    return WSYNC_CU_SUCCESS;
}

wsync_cu_result_t fake_context_pop(wsync_cu_context_t *context)
{
    struct wsync_cu_context *top = NULL;
    const wsync_cu_result_t code = fake_enter_return("cuCtxPopCurrent", &top);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    pushed_count--;
    if (context != NULL) {
        *context = top;
    }
    return fake_leave(WSYNC_CU_SUCCESS);
}

wsync_cu_result_t fake_context_priorities(int *least, int *greatest)
{
    struct wsync_cu_context *context = NULL;
    const wsync_cu_result_t code =
        fake_enter_context("cuCtxGetStreamPriorityRange", &context);

    *least = 0;
    *greatest = 1 - fake.priorities;
    return code;
}

/* --- what tests call -------------------------------------------------------------------
 */

void fakecuda_census(fakecuda_census_t *census)
{
    fakecuda_census_t count = {.pushed = pushed_count};

    fake_lock();
    for (const fake_physical_t *at = fake.physicals; at != NULL; at = at->next) {
        count.physical++;
    }
    for (const fake_range_t *at = fake.ranges; at != NULL; at = at->next) {
        count.reserved += at->kind == FAKE_RESERVED;
        count.mapped += at->kind == FAKE_MAPPED;
        count.allocated += at->kind == FAKE_ALLOCATED || at->kind == FAKE_OPENED;
        count.registered += at->kind == FAKE_HOST;
    }
    fake_unlock();
    *census = count;
}
