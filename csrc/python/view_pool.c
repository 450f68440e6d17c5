/* SPDX-License-Identifier: Apache-2.0
 * ViewPool: torch tensors that are views of a Memory, handed out through DLPack, and the
 * count of those that are still alive. */
#include <stdatomic.h>
#include <stdlib.h>

#include "python/convert.h"
#include "python/device_types.h"
#include "python/layout.h"
#include "python/tensor_table.h"

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
    dl->dtype = wsync_py_dlpack_dtype(tensor->dtype);
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

static PyObject *pool_views(PyObject *self, PyObject *args)
{
    ModuleState *state = wsync_py_state_of(self);
    const DLPackExchangeAPI *api = NULL;
    LayoutObject *manifest = NULL;
    PyObject *like = NULL;
    uint32_t buffer = 0;
    PyObject *list = NULL;

    if (!PyArg_ParseTuple(args, "OO!O&:views", &like, state->type_Layout, &manifest,
                          wsync_py_convert_u32, &buffer)) {
        return NULL;
    }
    api = find_api(state, like);
    if (api == NULL) {
        return NULL;
    }
    list = PyList_New(0);
    if (list != NULL && append_views(state, api, ((ViewPoolObject *)self)->pool, manifest,
                                     buffer, list) < 0) {
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
    {"views", pool_views, METH_VARARGS, "views($self, like, layout, buffer, /)\n--\n\n"},
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
