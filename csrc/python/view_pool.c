/* SPDX-License-Identifier: Apache-2.0
 * ViewPool: torch tensors that are views of a Memory, handed out through DLPack, and the
 * count of those that are still alive. */
#include <stdatomic.h>
#include <stdlib.h>

#include "python/convert.h"
#include "python/device_types.h"
#include "python/layout.h"
#include "python/tensor_table.h"

static const DLDataType dlpack_dtypes[WSYNC_DTYPE_COUNT] = {
    [WSYNC_DTYPE_FLOAT64] = {kDLFloat, 64, 1},
    [WSYNC_DTYPE_FLOAT32] = {kDLFloat, 32, 1},
    [WSYNC_DTYPE_FLOAT16] = {kDLFloat, 16, 1},
    [WSYNC_DTYPE_BFLOAT16] = {kDLBfloat, 16, 1},
    [WSYNC_DTYPE_FLOAT8_E4M3FN] = {kDLFloat8_e4m3fn, 8, 1},
    [WSYNC_DTYPE_FLOAT8_E4M3FNUZ] = {kDLFloat8_e4m3fnuz, 8, 1},
    [WSYNC_DTYPE_FLOAT8_E5M2] = {kDLFloat8_e5m2, 8, 1},
    [WSYNC_DTYPE_FLOAT8_E5M2FNUZ] = {kDLFloat8_e5m2fnuz, 8, 1},
    [WSYNC_DTYPE_FLOAT8_E8M0FNU] = {kDLFloat8_e8m0fnu, 8, 1},
    [WSYNC_DTYPE_FLOAT4_E2M1FN_X2] = {kDLFloat4_e2m1fn, 4, 2},
    [WSYNC_DTYPE_INT64] = {kDLInt, 64, 1},
    [WSYNC_DTYPE_INT32] = {kDLInt, 32, 1},
    [WSYNC_DTYPE_INT16] = {kDLInt, 16, 1},
    [WSYNC_DTYPE_INT8] = {kDLInt, 8, 1},
    [WSYNC_DTYPE_UINT64] = {kDLUInt, 64, 1},
    [WSYNC_DTYPE_UINT32] = {kDLUInt, 32, 1},
    [WSYNC_DTYPE_UINT16] = {kDLUInt, 16, 1},
    [WSYNC_DTYPE_UINT8] = {kDLUInt, 8, 1},
    [WSYNC_DTYPE_BOOL] = {kDLBool, 8, 1},
    [WSYNC_DTYPE_COMPLEX64] = {kDLComplex, 64, 1},
    [WSYNC_DTYPE_COMPLEX128] = {kDLComplex, 128, 1},
};

DLDataType wsync_py_dlpack_dtype(wsync_dtype_t dtype)
{
    return dlpack_dtypes[dtype];
}

/* --- what views share: no Python object, because torch drops a view in any thread, with or
 *     without the interpreter lock ---------------------------------------------------- */

typedef struct view_pool {
    atomic_size_t references; /* the ViewPool object, and one a view */
    atomic_size_t live;
    wsync_memory_t *memory; /* counted */
} view_pool_t;

typedef struct view {
    DLManagedTensorVersioned managed;
    view_pool_t *pool; /* counted */
    int64_t shape[WSYNC_MAX_NDIM];
    int64_t stride[WSYNC_MAX_NDIM];
} view_t;

static view_pool_t *pool_create(const MemoryObject *memory)
{
    view_pool_t *pool = calloc(1, sizeof(*pool));

    if (pool != NULL) {
        atomic_init(&pool->references, 1);
        atomic_init(&pool->live, 0);
        pool->memory = memory->memory;
        wsync_memory_retain(pool->memory);
    }
    return pool;
}

static void pool_release(view_pool_t *pool)
{
    if (pool != NULL &&
        atomic_fetch_sub_explicit(&pool->references, 1, memory_order_acq_rel) == 1) {
        wsync_memory_destroy(pool->memory);
        free(pool);
    }
}

static void view_delete(DLManagedTensorVersioned *managed)
{
    view_t *view = managed->manager_ctx;

    /* first: who sees the count fall to 0 may park the memory */
    wsync_memory_unpin(view->pool->memory);
    /* release: whoever sees the count fall also sees that the bytes were read */
    (void)atomic_fetch_sub_explicit(&view->pool->live, 1, memory_order_release);
    pool_release(view->pool);
    free(view);
}

/* A contiguous view; the caller has checked that it lies inside the memory, and has pinned
 * that for it. */
static view_t *view_create(view_pool_t *pool, const wsync_tensor_t *tensor, uint64_t offset)
{
    view_t *view = calloc(1, sizeof(*view));
    DLTensor *dl = view != NULL ? &view->managed.dl_tensor : NULL;
    int64_t stride = 1;

    if (view == NULL) {
        return NULL;
    }
    for (uint32_t i = tensor->ndim; i-- > 0;) {
        view->shape[i] = tensor->shape[i];
        view->stride[i] = stride;
        stride *= tensor->shape[i] > 1 ? tensor->shape[i] : 1;
    }
    view->managed.version = (DLPackVersion){DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    view->managed.manager_ctx = view;
    view->managed.deleter = view_delete;
    dl->data = (char *)pool->memory->data + offset;
    dl->device = pool->memory->device->ordinal < 0
                     ? (DLDevice){kDLCPU, 0}
                     : (DLDevice){kDLCUDA, pool->memory->device->ordinal};
    dl->ndim = (int32_t)tensor->ndim;
    dl->dtype = dlpack_dtypes[tensor->dtype];
    dl->shape = view->shape;
    dl->strides = view->stride;
    view->pool = pool;
    (void)atomic_fetch_add_explicit(&pool->references, 1, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&pool->live, 1, memory_order_relaxed);
    return view;
}

/* --- the ViewPool type --------------------------------------------------------------- */

typedef struct ViewPoolObject {
    PyObject_HEAD
    view_pool_t *pool; /* counted */
} ViewPoolObject;

static PyObject *make_view(ModuleState *state, const DLPackExchangeAPI *api,
                           view_pool_t *pool, const wsync_tensor_t *tensor, uint64_t offset)
{
    const uint64_t size = pool->memory->nbytes;
    const size_t item = wsync_dtype_nbytes(tensor->dtype);
    wsync_error_t err = {0};
    uint64_t nbytes = 0;
    view_t *view = NULL;
    void *made = NULL;

    if (wsync_tensor_check(tensor, &nbytes, &err) != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    if (offset > size || nbytes > size - offset) {
        return wsync_py_fail(state, WSYNC_ERR_INVALID, "view",
                             "%s: %llu bytes at offset %llu of a memory of %llu",
                             tensor->name, (unsigned long long)nbytes,
                             (unsigned long long)offset, (unsigned long long)size);
    }
    if (offset % item != 0) {
        return wsync_py_fail(state, WSYNC_ERR_INVALID, "view",
                             "%s: offset %llu is not a multiple of %s's %zu bytes",
                             tensor->name, (unsigned long long)offset,
                             wsync_dtype_name(tensor->dtype), item);
    }
    if (wsync_memory_pin(pool->memory, &err) != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    view = view_create(pool, tensor, offset);
    if (view == NULL) {
        wsync_memory_unpin(pool->memory);
        return PyErr_NoMemory();
    }
    /* it owns the view from here on */
    if (api->managed_tensor_to_py_object_no_sync(&view->managed, &made) != 0) {
        return NULL;
    }
    return made;
}

/* How tensors of the type of `like` are made: NULL with UnsupportedError. */
static const DLPackExchangeAPI *find_api(ModuleState *state, PyObject *like)
{
    const DLPackExchangeAPI *api = wsync_py_exchange_api(state, like);

    if (api == NULL) {
        (void)wsync_py_fail(state, WSYNC_ERR_UNSUPPORTED, "view",
                            "views need a tensor of torch 2.10 or newer");
    }
    return api;
}

/* Reads the dtype and shape arguments of view(). */
static int read_request(ModuleState *state, const char *dtype, PyObject *shape,
                        wsync_tensor_t *tensor)
{
    const Py_ssize_t ndim = PySequence_Size(shape);
    wsync_error_t err = {0};

    if (ndim < 0) {
        return -1;
    }
    if (wsync_dtype_from_name(dtype, &tensor->dtype, &err) != WSYNC_OK) {
        (void)wsync_py_raise(state, &err);
        return -1;
    }
    if (ndim > WSYNC_MAX_NDIM) {
        (void)wsync_py_fail(state, WSYNC_ERR_UNSUPPORTED, "view",
                            "%zd dimensions, at most %d are supported", ndim,
                            (int)WSYNC_MAX_NDIM);
        return -1;
    }
    return wsync_py_read_int64s(shape, "shape", tensor->shape, &tensor->ndim);
}

static PyObject *refuse_keywords(const char *name)
{
    return PyErr_Format(PyExc_TypeError, "%s() takes positional arguments only", name);
}

static PyObject *pool_view(PyObject *self, PyTypeObject *cls, PyObject *const *args,
                           Py_ssize_t count, PyObject *kwnames)
{
    ModuleState *state = wsync_py_type_state(cls);
    wsync_tensor_t tensor = {.name = "view"};
    const DLPackExchangeAPI *api = NULL;
    const char *dtype = NULL;
    uint64_t offset = 0;

    if (count != 4 || kwnames != NULL) {
        return refuse_keywords("view");
    }
    dtype = wsync_py_read_text(state, args[1], "dtype");
    if (dtype == NULL || read_request(state, dtype, args[2], &tensor) < 0) {
        return NULL;
    }
    offset = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    api = find_api(state, args[0]);
    if (api == NULL) {
        return NULL;
    }
    return make_view(state, api, ((ViewPoolObject *)self)->pool, &tensor, offset);
}

/* A shard that is its whole tensor, in row-major order without gaps. */
static bool is_whole(const wsync_tensor_t *tensor, const wsync_shard_t *shard)
{
    const wsync_box_t whole = wsync_box_whole(tensor->ndim, tensor->shape);
    int64_t stride = (int64_t)wsync_dtype_nbytes(tensor->dtype);

    if (!wsync_box_equal(&shard->box, &whole)) {
        return false;
    }
    for (uint32_t i = tensor->ndim; i-- > 0;) {
        if (tensor->shape[i] > 1 && shard->stride[i] != stride) {
            return false;
        }
        stride *= tensor->shape[i];
    }
    return true;
}

static int append_view(PyObject *list, const char *name, PyObject *tensor)
{
    PyObject *pair = tensor != NULL ? Py_BuildValue("sN", name, tensor) : NULL;
    const int result = pair != NULL ? PyList_Append(list, pair) : -1;

    Py_XDECREF(pair);
    return result;
}

static int append_views(ModuleState *state, const DLPackExchangeAPI *api, view_pool_t *pool,
                        LayoutObject *manifest, uint32_t buffer, PyObject *list)
{
    size_t count = 0;
    const wsync_shard_t *const *shards =
        wsync_py_layout_in_buffer(manifest, buffer, &count);

    if (shards == NULL) {
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        const wsync_tensor_t *tensor =
            wsync_layout_tensor(manifest->layout, shards[i]->tensor);

        if (is_whole(tensor, shards[i]) &&
            append_view(list, tensor->name,
                        make_view(state, api, pool, tensor, shards[i]->offset)) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *pool_views(PyObject *self, PyTypeObject *cls, PyObject *const *args,
                            Py_ssize_t count, PyObject *kwnames)
{
    ModuleState *state = wsync_py_type_state(cls);
    const DLPackExchangeAPI *api = NULL;
    long long number = 0;
    uint32_t buffer = 0;
    PyObject *list = NULL;

    if (count != 3 || kwnames != NULL) {
        return refuse_keywords("views");
    }
    if (Py_TYPE(args[1]) != state->type_Layout) {
        PyErr_SetString(PyExc_TypeError, "views() takes a Layout as its second argument");
        return NULL;
    }
    number = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || wsync_py_read_u32(number, "buffer", &buffer) < 0) {
        return NULL;
    }
    api = find_api(state, args[0]);
    if (api == NULL) {
        return NULL;
    }
    list = PyList_New(0);
    if (list != NULL && append_views(state, api, ((ViewPoolObject *)self)->pool,
                                     (LayoutObject *)args[1], buffer, list) < 0) {
        Py_CLEAR(list);
    }
    return list;
}

WSYNC_PY_NUMBER_GETTER(pool_live,
                       atomic_load_explicit(&((ViewPoolObject *)self)->pool->live,
                                            memory_order_acquire))

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"memory", NULL};
    ModuleState *state = wsync_py_type_state(type);
    PyObject *memory = NULL;
    ViewPoolObject *self = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:ViewPool", keywords,
                                     state->type_Memory, &memory)) {
        return NULL;
    }
    self = (ViewPoolObject *)wsync_py_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    self->pool = pool_create((MemoryObject *)memory);
    if (self->pool == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void pool_dealloc(PyObject *self)
{
    pool_release(((ViewPoolObject *)self)->pool);
    wsync_py_free(self);
}

static PyMethodDef pool_methods[] = {
    {"view", (PyCFunction)(void (*)(void))pool_view,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     "view($self, like, dtype, shape, offset, /)\n--\n\n"},
    {"views", (PyCFunction)(void (*)(void))pool_views,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     "views($self, like, layout, buffer, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_getset[] = {
    {"live", pool_live, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "ViewPool(memory)\n--\n\n"},
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_ViewPool = {
    "wsync._core.ViewPool", sizeof(ViewPoolObject), 0, pool_slots, NULL, NULL};
