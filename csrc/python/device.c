/* SPDX-License-Identifier: Apache-2.0
 * Device, and what the GPU driver says of itself. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/hex.h"
#include "device/cuda.h"
#include "device/cuda_compile.h"
#include "device/host.h"
#include "python/convert.h"
#include "python/device_types.h"

/* Immutable.  Devices live as long as the process. */
typedef struct DeviceObject {
    PyObject_HEAD
    const wsync_device_t *device;
} DeviceObject;

/* --- UUIDs --------------------------------------------------------------------------- */

void wsync_py_uuid_format(const uint8_t *uuid, char text[WSYNC_PY_UUID_NBYTES])
{
    static const uint8_t host[WSYNC_DEVICE_UUID_NBYTES];
    char *at = text;

    text[0] = '\0';
    if (memcmp(uuid, host, sizeof(host)) == 0) {
        return;
    }
    at += snprintf(text, WSYNC_PY_UUID_NBYTES, "GPU");
    for (int i = 0; i < WSYNC_DEVICE_UUID_NBYTES; i++) {
        const char *dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";

        at += snprintf(at, (size_t)(text + WSYNC_PY_UUID_NBYTES - at), "%s%02x", dash,
                       uuid[i]);
    }
}

/* Takes 32 hexadecimal digits in groups as they please, after "GPU-" or nothing. */
static bool parse_uuid(const char *text, wsync_cu_uuid_t *uuid)
{
    const char *at = strncmp(text, "GPU-", 4) == 0 ? text + 4 : text;

    for (int i = 0; i < WSYNC_CUDA_UUID_NBYTES; i++) {
        int value;

        at += *at == '-';
        value = wsync_hex_byte(at);
        if (value < 0) {
            return false;
        }
        uuid->bytes[i] = (uint8_t)value;
        at += 2;
    }
    return *at == '\0';
}

/* --- Device -------------------------------------------------------------------------- */

int wsync_py_convert_device(PyObject *object, void *argument)
{
    wsync_py_device_arg_t *device = argument;

    if (object == Py_None) {
        return 1;
    }
    if (wsync_py_check_type(object, device->state->type_Device, "device") < 0) {
        return 0;
    }
    device->device = ((DeviceObject *)object)->device;
    return 1;
}

PyObject *wsync_py_device_wrap(ModuleState *state, const wsync_device_t *device)
{
    DeviceObject *self = (DeviceObject *)wsync_py_alloc(state->type_Device);

    if (self != NULL) {
        self->device = device;
    }
    return (PyObject *)self;
}

static void device_dealloc(PyObject *object)
{
    wsync_py_free(object);
}

static PyObject *device_get_name(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(((DeviceObject *)object)->device->name);
}

static PyObject *device_get_uuid(PyObject *object, void *Py_UNUSED(closure))
{
    char text[WSYNC_PY_UUID_NBYTES];

    wsync_py_uuid_format(((DeviceObject *)object)->device->uuid, text);
    return PyUnicode_FromString(text);
}

static PyObject *device_get_ordinal(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((DeviceObject *)object)->device->ordinal);
}

static PyObject *device_get_mps(PyObject *object, void *Py_UNUSED(closure))
{
    const wsync_device_t *base = ((DeviceObject *)object)->device;

    return PyBool_FromLong(base->ordinal >= 0 && wsync_cuda_of(base)->mps);
}

static PyObject *device_get_peers(PyObject *object, void *Py_UNUSED(closure))
{
    const wsync_device_t *base = ((DeviceObject *)object)->device;
    const bool on_host = base->ordinal < 0;
    const wsync_cuda_device_t *device = on_host ? NULL : wsync_cuda_of(base);
    PyObject *peers = PyList_New(0);

    for (int i = 0; peers != NULL && !on_host && i < device->driver->device_count; i++) {
        char text[WSYNC_PY_UUID_NBYTES];
        wsync_cu_uuid_t uuid;
        bool reaches = false;
        wsync_error_t err = {0};
        PyObject *item = NULL;

        if (wsync_cuda_reaches(device, i, &reaches, &uuid, &err) != WSYNC_OK) {
            Py_DECREF(peers);
            return wsync_py_raise(wsync_py_state_of(object), &err);
        }
        wsync_py_uuid_format(uuid.bytes, text);
        item = PyUnicode_FromString(text);
        if (item == NULL || (reaches && PyList_Append(peers, item) < 0)) {
            Py_CLEAR(peers);
        }
        Py_XDECREF(item);
    }
    return peers;
}

static PyObject *device_repr(PyObject *object)
{
    PyObject *uuid = device_get_uuid(object, NULL);
    PyObject *text;

    if (uuid == NULL) {
        return NULL;
    }
    text = PyUnicode_GetLength(uuid) > 0 ? PyUnicode_FromFormat("<wsync device: %U>", uuid)
                                         : PyUnicode_FromString("<wsync device: the host>");
    Py_DECREF(uuid);
    return text;
}

static PyObject *device_memory_available(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const wsync_device_t *device = ((DeviceObject *)object)->device;
    uint64_t nbytes = 0;
    wsync_error_t err = {0};
    wsync_status_t status = WSYNC_OK;

    Py_BEGIN_ALLOW_THREADS
        if (device->ordinal >= 0) {
            status = wsync_cuda_free_nbytes(wsync_cuda_of(device), &nbytes, &err);
        } else {
            nbytes = wsync_host_memory_available("");
        }
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? PyLong_FromUnsignedLongLong(nbytes)
                              : wsync_py_raise(wsync_py_state_of(object), &err);
}

static PyObject *device_settle(PyObject *object, PyObject *Py_UNUSED(unused))
{
    wsync_error_t err = {0};
    wsync_status_t status;

    Py_BEGIN_ALLOW_THREADS
        status = wsync_device_settle(((DeviceObject *)object)->device, &err);
    Py_END_ALLOW_THREADS
    return wsync_py_none(wsync_py_state_of(object), status, &err);
}

static PyMethodDef device_methods[] = {
    {"settle", device_settle, METH_NOARGS, "settle($self)\n--\n\n"},
    {"memory_available", device_memory_available, METH_NOARGS,
     "memory_available($self)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_getset[] = {
    {"name", device_get_name, NULL, NULL, NULL},
    {"uuid", device_get_uuid, NULL, NULL, NULL},
    {"ordinal", device_get_ordinal, NULL, NULL, NULL},
    {"mps", device_get_mps, NULL, NULL, NULL},
    {"peers", device_get_peers, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_dealloc, device_dealloc},
    {Py_tp_repr, device_repr},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Device = {"wsync._core.Device",
                                              sizeof(DeviceObject),
                                              Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                              device_slots,
                                              NULL,
                                              NULL};

static PyObject *host(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return wsync_py_device_wrap(wsync_py_state(module), wsync_device_host());
}

/* --- gpu() --------------------------------------------------------------------------- */

/* Without the GIL: compiling takes seconds. */
static wsync_status_t open_gpu(const wsync_cu_uuid_t *uuid, wsync_compile_spec_t *spec,
                               const wsync_device_t **device, wsync_error_t *err)
{
    wsync_kernel_image_t image = {0};
    const wsync_cuda_driver_t *driver = NULL;
    wsync_cuda_info_t info;
    int ordinal = -1;
    wsync_status_t status = wsync_cuda_driver(&driver, err);

    if (status == WSYNC_OK) {
        status = wsync_cuda_find(driver, uuid, &ordinal, &info, err);
    }
    if (status == WSYNC_OK && wsync_device_cuda(uuid, NULL, device, NULL) == WSYNC_OK) {
        return WSYNC_OK; /* its kernels are loaded */
    }
    if (status == WSYNC_OK) {
        spec->capability = (unsigned)(info.major * 10 + info.minor);
        spec->driver = driver->version;
        status = wsync_cuda_compile(spec, &image, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_device_cuda(uuid, image.data, device, err);
    }
    wsync_kernel_image_fini(&image);
    return status;
}

static PyObject *gpu(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"uuid", "libraries", "cache", NULL};
    ModuleState *state = wsync_py_state(module);
    const wsync_device_t *device = NULL;
    wsync_compile_spec_t spec = {0};
    wsync_cu_uuid_t uuid;
    wsync_error_t err = {0};
    wsync_status_t status;
    const char *text;
    wsync_py_items_t paths;
    PyObject *libraries = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|Oz:gpu", keywords, &text, &libraries,
                                     &spec.cache)) {
        return NULL;
    }
    if (!parse_uuid(text, &uuid)) {
        return wsync_py_fail(
            state, WSYNC_ERR_INVALID, "gpu",
            "'%.64s' is not a GPU's UUID, which has \"GPU-\" and 32 hexadecimal digits",
            text);
    }
    if (wsync_py_items_init_texts(&paths, state, libraries, "libraries") < 0) {
        return NULL;
    }
    spec.libraries = (const char *const *)paths.items;
    spec.library_count = paths.count;
    Py_BEGIN_ALLOW_THREADS
        status = open_gpu(&uuid, &spec, &device, &err);
    Py_END_ALLOW_THREADS
    wsync_py_items_fini(&paths);
    return status == WSYNC_OK ? wsync_py_device_wrap(state, device)
                              : wsync_py_raise(state, &err);
}

/* --- gpus() -------------------------------------------------------------------------- */

static PyObject *make_list(ModuleState *state, const wsync_cuda_driver_t *driver)
{
    PyObject *list = PyList_New(0);

    for (int i = 0; list != NULL && i < driver->device_count; i++) {
        wsync_cuda_info_t info;
        wsync_error_t err = {0};
        char uuid[WSYNC_PY_UUID_NBYTES];
        PyObject *item = NULL;

        if (wsync_cuda_describe(driver, i, &info, &err) != WSYNC_OK) {
            (void)wsync_py_raise(state, &err);
        } else {
            wsync_py_uuid_format(info.uuid.bytes, uuid);
            item = Py_BuildValue("(ssK(ii))", uuid, info.name,
                                 (unsigned long long)info.nbytes, info.major, info.minor);
        }
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *cuda_devices(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const wsync_cuda_driver_t *driver = NULL;
    ModuleState *state = wsync_py_state(module);
    wsync_error_t err = {0};
    wsync_status_t status;
    PyObject *list;

    Py_BEGIN_ALLOW_THREADS
        status = wsync_cuda_driver(&driver, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    list = make_list(state, driver);
    return list != NULL ? Py_BuildValue("(iN)", driver->version, list) : NULL;
}

/* --- host_register() ----------------------------------------------------------------- */

static const char registration_capsule[] = "wsync.registration";

typedef struct registration {
    const wsync_cuda_device_t *device;
    void *data;      /* NULL: not registered */
    PyObject *owner; /* owned; keeps the memory */
} registration_t;

/* The destructor of a capsule. */
static void registration_destroy(PyObject *capsule)
{
    registration_t *self = PyCapsule_GetPointer(capsule, registration_capsule);

    /* A driver may wait for its device, and that for a thread of this process. */
    Py_BEGIN_ALLOW_THREADS
        if (self->data != NULL && wsync_cuda_enter_to_free(self->device)) {
            wsync_cuda_unregister(self->device, self->data);
            wsync_cuda_leave(self->device);
        }
    Py_END_ALLOW_THREADS
    Py_DECREF(self->owner);
    free(self);
}

static PyObject *host_register(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"address", "nbytes", "device", "owner", NULL};
    ModuleState *state = wsync_py_state(module);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    registration_t *self;
    PyObject *capsule;
    PyObject *owner;
    void *record;
    void *data;
    uint64_t nbytes;
    wsync_cu_ptr_t at;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O:host_register", keywords,
                                     wsync_py_convert_address, &data, wsync_py_convert_u64,
                                     &nbytes, wsync_py_convert_device, &device, &owner)) {
        return NULL;
    }
    if (device.device == wsync_device_host()) {
        return Py_NewRef(owner);
    }
    capsule = wsync_py_capsule_new(sizeof(*self), registration_capsule,
                                   registration_destroy, &record);
    if (capsule == NULL) {
        return NULL;
    }
    self = record;
    self->device = wsync_cuda_of(device.device);
    self->owner = Py_NewRef(owner);
    Py_BEGIN_ALLOW_THREADS
        status = wsync_cuda_enter(self->device, &err);
        if (status == WSYNC_OK) {
            status =
                wsync_cuda_register(self->device, data, nbytes, "host memory", &at, &err);
            self->data = status == WSYNC_OK ? data : NULL;
            wsync_cuda_leave(self->device);
        }
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        Py_DECREF(capsule);
        return wsync_py_raise(state, &err);
    }
    return capsule;
}

PyMethodDef wsync_py_functions_device[] = {
    {"host", host, METH_NOARGS, "host()\n--\n\n"},
    {"gpu", WSYNC_PY_KEYWORDS(gpu), "gpu(uuid, libraries=(), cache=None)\n--\n\n"},
    {"cuda_devices", cuda_devices, METH_NOARGS, "cuda_devices()\n--\n\n"},
    {"host_register", WSYNC_PY_KEYWORDS(host_register),
     "host_register(address, nbytes, device, owner)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
