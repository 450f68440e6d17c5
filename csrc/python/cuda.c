/* SPDX-License-Identifier: Apache-2.0
 * What the GPU driver says of itself. */
#include "device/cuda_driver.h"

#include <stdio.h>

#include "python/module.h"

enum { UUID_TEXT_NBYTES = 48 };

/* "GPU-" and the digits in groups of 4, 2, 2, 2 and 6 bytes, as nvidia-smi writes them. */
static void write_uuid(const wsync_cu_uuid_t *uuid, char *text)
{
    char *at = text + snprintf(text, UUID_TEXT_NBYTES, "GPU");

    for (int i = 0; i < WSYNC_CUDA_UUID_NBYTES; i++) {
        const char *dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";

        at += snprintf(at, (size_t)(text + UUID_TEXT_NBYTES - at), "%s%02x", dash,
                       uuid->bytes[i]);
    }
}

static PyObject *make_list(ModuleState *state, const wsync_cuda_driver_t *driver)
{
    PyObject *list = PyList_New(0);

    for (int i = 0; list != NULL && i < driver->device_count; i++) {
        wsync_cuda_info_t info;
        wsync_error_t err = {0};
        char uuid[UUID_TEXT_NBYTES];
        PyObject *item = NULL;

        if (wsync_cuda_describe(driver, i, &info, &err) != WSYNC_OK) {
            (void)wsync_py_raise(state, &err);
        } else {
            write_uuid(&info.uuid, uuid);
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

static PyObject *cuda_devices(PyObject *module, PyObject *unused)
{
    const wsync_cuda_driver_t *driver = NULL;
    ModuleState *state = wsync_py_state(module);
    wsync_error_t err = {0};
    wsync_status_t status;
    PyObject *list;

    (void)unused;
    Py_BEGIN_ALLOW_THREADS
        status = wsync_cuda_driver(&driver, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    list = make_list(state, driver);
    return list != NULL ? Py_BuildValue("(iN)", driver->version, list) : NULL;
}

static PyMethodDef cuda_functions[] = {
    {"cuda_devices", cuda_devices, METH_NOARGS,
     "cuda_devices()\n--\n\n"
     "(version, [(uuid, name, bytes, (major, minor)), ...]) of the GPUs that this process\n"
     "sees.  UnsupportedError says why there is none to use."},
    {NULL, NULL, 0, NULL},
};

int wsync_py_register_cuda(PyObject *module)
{
    return PyModule_AddFunctions(module, cuda_functions);
}
