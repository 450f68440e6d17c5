/* SPDX-License-Identifier: Apache-2.0
 * Torch tensors of memory that DLPack describes: by the C exchange API, or by a capsule. */
#include "python/tensor_import.h"

#include <stdlib.h>

#include "python/convert.h"
#include "python/tensor_table.h"

static const char capsule_name[] = "dltensor";

/* --- by torch.utils.dlpack ------------------------------------------------------------ */

/* The bytes of a tensor, which every version of torch takes; not so each dtype. */
typedef struct bytes_of_tensor {
    DLManagedTensor legacy;
    DLManagedTensorVersioned *managed; /* owned */
    int64_t nbytes;
} bytes_of_tensor_t;

static void bytes_delete(DLManagedTensor *legacy)
{
    bytes_of_tensor_t *bytes = legacy->manager_ctx;

    bytes->managed->deleter(bytes->managed);
    free(bytes);
}

static void capsule_destroy(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, capsule_name)) { /* torch renames what it takes */
        bytes_delete(PyCapsule_GetPointer(capsule, capsule_name));
    }
}

/* Takes over `managed`, also when it fails. */
static PyObject *make_capsule(DLManagedTensorVersioned *managed, uint64_t nbytes)
{
    bytes_of_tensor_t *bytes = calloc(1, sizeof(*bytes));
    PyObject *capsule = NULL;

    if (bytes == NULL) {
        managed->deleter(managed);
        return PyErr_NoMemory();
    }
    bytes->managed = managed;
    bytes->nbytes = (int64_t)nbytes;
    bytes->legacy.dl_tensor = managed->dl_tensor;
    bytes->legacy.dl_tensor.dtype = wsync_py_dlpack_dtype(WSYNC_DTYPE_UINT8);
    bytes->legacy.dl_tensor.ndim = 1;
    bytes->legacy.dl_tensor.shape = &bytes->nbytes;
    bytes->legacy.dl_tensor.strides = NULL;
    bytes->legacy.manager_ctx = bytes;
    bytes->legacy.deleter = bytes_delete;
    capsule = PyCapsule_New(&bytes->legacy, capsule_name, capsule_destroy);
    if (capsule == NULL) {
        bytes_delete(&bytes->legacy);
    }
    return capsule;
}

/* bytes.view(torch.<dtype>).view(shape); takes over `bytes`, which may be NULL. */
static PyObject *shaped(PyObject *bytes, PyObject *torch, const wsync_tensor_t *tensor)
{
    PyObject *dtype = bytes != NULL
                          ? PyObject_GetAttrString(torch, wsync_dtype_name(tensor->dtype))
                          : NULL;
    PyObject *flat = dtype != NULL ? PyObject_CallMethod(bytes, "view", "O", dtype) : NULL;
    PyObject *shape =
        flat != NULL ? wsync_py_int64_tuple(tensor->shape, tensor->ndim) : NULL;
    PyObject *result =
        shape != NULL ? PyObject_CallMethod(flat, "view", "(O)", shape) : NULL;

    Py_XDECREF(shape);
    Py_XDECREF(flat);
    Py_XDECREF(dtype);
    Py_XDECREF(bytes);
    return result;
}

static PyObject *import_capsule(PyObject *torch, DLManagedTensorVersioned *managed,
                                const wsync_tensor_t *tensor, uint64_t nbytes)
{
    PyObject *capsule = make_capsule(managed, nbytes);
    PyObject *dlpack = capsule != NULL ? PyImport_ImportModule("torch.utils.dlpack") : NULL;
    PyObject *bytes =
        dlpack != NULL ? PyObject_CallMethod(dlpack, "from_dlpack", "O", capsule) : NULL;

    Py_XDECREF(dlpack);
    Py_XDECREF(capsule);
    return shaped(bytes, torch, tensor);
}

/* Whether it is a tensor of torch, or a type of these; -1 with an exception. */
static int is_torch(PyObject *torch, PyObject *like)
{
    PyObject *type = PyType_Check(like) ? like : (PyObject *)Py_TYPE(like);
    PyObject *base = PyObject_GetAttrString(torch, "Tensor");
    const int result = base != NULL ? PyObject_IsSubclass(type, base) : -1;

    Py_XDECREF(base);
    return result;
}

/* --- either --------------------------------------------------------------------------- */

int wsync_py_importer_init(wsync_py_importer_t *importer, ModuleState *state,
                           PyObject *like)
{
    PyObject *name = NULL;
    int known = 0;

    *importer = (wsync_py_importer_t){.api = wsync_py_exchange_api(state, like)};
    if (importer->api != NULL &&
        importer->api->managed_tensor_to_py_object_no_sync != NULL) {
        return 0;
    }
    importer->api = NULL;
    name = PyErr_Occurred() ? NULL : PyUnicode_FromString("torch");
    importer->torch = name != NULL ? PyImport_GetModule(name) : NULL;
    Py_XDECREF(name);
    known = importer->torch != NULL ? is_torch(importer->torch, like) : 0;
    if (known > 0) {
        return 0;
    }
    wsync_py_importer_fini(importer);
    if (!PyErr_Occurred()) {
        (void)wsync_py_fail(state, WSYNC_ERR_UNSUPPORTED, "view",
                            "views need a tensor of torch, or of a type with DLPack's C "
                            "exchange API");
    }
    return -1;
}

void wsync_py_importer_fini(wsync_py_importer_t *importer)
{
    importer->api = NULL;
    Py_CLEAR(importer->torch);
}

PyObject *wsync_py_import(const wsync_py_importer_t *importer,
                          DLManagedTensorVersioned *managed, const wsync_tensor_t *tensor,
                          uint64_t nbytes)
{
    void *object = NULL;

    if (importer->api == NULL) {
        return import_capsule(importer->torch, managed, tensor, nbytes);
    }
    if (importer->api->managed_tensor_to_py_object_no_sync(managed, &object) != 0 ||
        object == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_RuntimeError, "torch made no tensor of a view");
        }
        return NULL;
    }
    return object;
}
