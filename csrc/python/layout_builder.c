/* SPDX-License-Identifier: Apache-2.0
 * LayoutBuilder.  Arguments are read completely before the builder is touched: reading them
 * may run Python code, which may use the same builder. */
#include <stdlib.h>

#include "python/convert.h"
#include "python/layout.h"
#include "python/tensor_table.h"

typedef struct BuilderObject {
    PyObject_HEAD
    wsync_layout_builder_t *builder; /* owned; NULL while build() runs */
    uint32_t rank;
} BuilderObject;

static PyObject *raise_for(PyObject *self, const wsync_error_t *err)
{
    return wsync_py_raise(wsync_py_state_of(self), err);
}

/* The builder, or NULL with StateError while another thread is in build(). */
static wsync_layout_builder_t *get_builder(PyObject *self)
{
    wsync_layout_builder_t *builder = ((BuilderObject *)self)->builder;

    if (builder == NULL) {
        (void)wsync_py_fail(wsync_py_state_of(self), WSYNC_ERR_STATE, "LayoutBuilder",
                            "build() is running in another thread");
    }
    return builder;
}

static PyObject *builder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"rank", NULL};
    BuilderObject *self;
    long long value = 0;
    uint32_t rank;
    wsync_error_t err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|L:LayoutBuilder", keywords, &value) ||
        wsync_py_read_u32(value, "rank", &rank) < 0) {
        return NULL;
    }
    self = (BuilderObject *)wsync_py_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    self->rank = rank;
    if (wsync_layout_builder_create(&self->builder, &err) != WSYNC_OK) {
        Py_DECREF(self);
        return wsync_py_raise(wsync_py_type_state(type), &err);
    }
    return (PyObject *)self;
}

static void builder_dealloc(PyObject *self)
{
    wsync_layout_builder_destroy(((BuilderObject *)self)->builder);
    wsync_py_free(self);
}

static const char *read_text(PyObject *self, PyObject *object, const char *what)
{
    return wsync_py_read_text(wsync_py_state_of(self), object, what);
}

/* Reads what names a tensor; shape becomes tensor->shape and tensor->ndim.  The name is
 * borrowed. */
static int read_tensor(PyObject *self, PyObject *name_object, const char *dtype,
                       PyObject *shape, long long group, wsync_tensor_t *tensor)
{
    const char *name = read_text(self, name_object, "name");
    wsync_error_t err = {0};

    tensor->name = name;
    if (name == NULL ||
        wsync_py_read_int64s(shape, "shape", tensor->shape, &tensor->ndim) < 0 ||
        wsync_py_read_u32(group, "group", &tensor->group) < 0) {
        return -1;
    }
    if (wsync_dtype_from_name(dtype, &tensor->dtype, &err) != WSYNC_OK) {
        const wsync_error_t cause = err;

        (void)wsync_py_fail(wsync_py_state_of(self), cause.status, cause.origin,
                            "%.256s: %.256s", name, cause.message);
        return -1;
    }
    return 0;
}

static PyObject *builder_add_tensor(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"name", "dtype", "shape", "group", NULL};
    PyObject *name;
    const char *dtype;
    PyObject *shape;
    long long group = 0;
    wsync_tensor_t tensor = {0};
    wsync_layout_builder_t *builder;
    wsync_error_t err = {0};
    uint32_t index;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsO|L:add_tensor", keywords, &name,
                                     &dtype, &shape, &group) ||
        read_tensor(self, name, dtype, shape, group, &tensor) < 0) {
        return NULL;
    }
    builder = get_builder(self);
    if (builder == NULL) {
        return NULL;
    }
    if (wsync_layout_builder_tensor(builder, &tensor, &index, &err) != WSYNC_OK) {
        return raise_for(self, &err);
    }
    Py_RETURN_NONE;
}

/* Reads steps; NULL or None: none. */
static int read_steps(PyObject *object, uint32_t *step, unsigned ndim)
{
    int64_t values[WSYNC_MAX_NDIM];

    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (wsync_py_read_exactly(object, "steps", values, ndim) < 0) {
        return -1;
    }
    for (unsigned i = 0; i < ndim; i++) {
        if (wsync_py_read_u32(values[i], "step", &step[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Adds a shard of a tensor, both by name. */
static wsync_status_t add_shard(wsync_layout_builder_t *builder,
                                const wsync_tensor_t *tensor, const char *origin,
                                wsync_shard_t *shard, wsync_error_t *err)
{
    wsync_status_t status =
        wsync_layout_builder_tensor(builder, tensor, &shard->tensor, err);

    if (status == WSYNC_OK) {
        status = wsync_layout_builder_origin(builder, origin, &shard->origin, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_shard(builder, shard, err);
    }
    return status;
}

static PyObject *builder_add_shard(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"name",   "dtype",   "shape",  "start", "extent", "buffer",
                               "offset", "strides", "origin", "group", "steps",  NULL};
    PyObject *name;
    const char *dtype;
    PyObject *origin_object = NULL;
    const char *origin = "";
    PyObject *shape;
    PyObject *start;
    PyObject *extent;
    PyObject *strides;
    PyObject *steps = NULL;
    long long buffer;
    long long offset;
    long long group = 0;
    wsync_tensor_t tensor = {0};
    wsync_shard_t shard = {.rank = ((BuilderObject *)self)->rank,
                           .box = wsync_box_whole(0, NULL)};
    wsync_layout_builder_t *builder;
    wsync_error_t err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsOOOLLO|OLO:add_shard", keywords,
                                     &name, &dtype, &shape, &start, &extent, &buffer,
                                     &offset, &strides, &origin_object, &group, &steps) ||
        read_tensor(self, name, dtype, shape, group, &tensor) < 0 ||
        wsync_py_read_exactly(start, "start", shard.box.start, tensor.ndim) < 0 ||
        wsync_py_read_exactly(extent, "extent", shard.box.extent, tensor.ndim) < 0 ||
        wsync_py_read_exactly(strides, "strides", shard.stride, tensor.ndim) < 0 ||
        read_steps(steps, shard.step, tensor.ndim) < 0 ||
        wsync_py_read_u32(buffer, "buffer", &shard.buffer) < 0) {
        return NULL;
    }
    if (origin_object != NULL) {
        origin = read_text(self, origin_object, "origin");
        if (origin == NULL) {
            return NULL;
        }
    }
    shard.offset = (uint64_t)offset; /* a negative one is beyond what a layout takes */
    builder = get_builder(self);
    if (builder == NULL) {
        return NULL;
    }
    if (add_shard(builder, &tensor, origin, &shard, &err) != WSYNC_OK) {
        return raise_for(self, &err);
    }
    Py_RETURN_NONE;
}

/* Row `index` of a table as the whole tensor `name` in buffer `index`. */
static int add_row(PyObject *self, const wsync_tensor_row_t *row, const char *name,
                   uint32_t group, size_t index)
{
    wsync_tensor_t tensor = {
        .name = name, .dtype = row->dtype, .ndim = row->ndim, .group = group};
    wsync_shard_t shard = {.rank = ((BuilderObject *)self)->rank,
                           .box = wsync_box_whole(row->ndim, row->shape)};
    wsync_layout_builder_t *builder = get_builder(self);
    wsync_error_t err = {0};
    wsync_status_t status = WSYNC_OK;

    if (builder == NULL ||
        wsync_py_read_u32((long long)index, "buffer", &shard.buffer) < 0) {
        return -1;
    }
    for (unsigned i = 0; i < row->ndim; i++) {
        tensor.shape[i] = row->shape[i];
        if (row->shape[i] == 1) {
            continue; /* torch lets any stride stand here */
        }
        if (__builtin_mul_overflow(row->stride[i], (int64_t)wsync_dtype_nbytes(row->dtype),
                                   &shard.stride[i])) {
            status = wsync_fail(&err, WSYNC_ERR_INVALID, 0, "layout",
                                "%.256s: dim %u: stride %lld in bytes exceeds 64 bits",
                                name, i, (long long)row->stride[i]);
        }
    }
    if (status == WSYNC_OK) {
        /* The tensor is its own parameter. */
        status = add_shard(builder, &tensor, name, &shard, &err);
    }
    if (status != WSYNC_OK) {
        (void)raise_for(self, &err);
        return -1;
    }
    return 0;
}

static int read_group(const void *Py_UNUSED(context), PyObject *object,
                      size_t Py_UNUSED(index), void *item)
{
    const long long group = PyLong_AsLongLong(object);

    return PyErr_Occurred() != NULL ? -1 : wsync_py_read_u32(group, "group", item);
}

static PyObject *builder_add_tensors(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"names", "tensors", "groups", NULL};
    ModuleState *state = wsync_py_state_of(self);
    PyObject *sequences[2] = {NULL, Py_None};
    wsync_py_items_t names = {0};  /* const char * */
    wsync_py_items_t groups = {0}; /* uint32_t; none: all 0 */
    const TensorTableObject *table;
    PyObject *result = NULL;
    size_t count;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!|O:add_tensors", keywords,
                                     &sequences[0], state->type_TensorTable, &table,
                                     &sequences[1]) ||
        wsync_py_items_init_texts(&names, state, sequences[0], "names") < 0) {
        return NULL;
    }
    count = (size_t)table->count;
    if (sequences[1] != Py_None &&
        wsync_py_items_init(&groups, sequences[1], sizeof(uint32_t), read_group, NULL) <
            0) {
        goto cleanup;
    }
    if (names.count != count || (sequences[1] != Py_None && groups.count != count)) {
        PyErr_Format(PyExc_ValueError, "%zu names and %zu groups for %zu tensors",
                     names.count, groups.count, count);
        goto cleanup;
    }
    for (size_t i = 0; i < count; i++) {
        if (add_row(self, &table->rows[i], ((const char **)names.items)[i],
                    groups.count > 0 ? ((const uint32_t *)groups.items)[i] : 0, i) < 0) {
            goto cleanup;
        }
    }
    result = Py_NewRef(Py_None);

cleanup:
    wsync_py_items_fini(&names);
    wsync_py_items_fini(&groups);
    return result;
}

/* A part of a local parameter: a box of the full one, and where it starts in the local. */
typedef struct region {
    wsync_box_t box;
    int64_t local[WSYNC_MAX_NDIM];
} region_t;

typedef struct parameter {
    const char *origin;
    const char *dtype; /* empty: every map has its own */
    uint32_t rank;
    uint32_t buffer;
    uint32_t ndim;
    int64_t stride[WSYNC_MAX_NDIM]; /* elements */
    wsync_py_items_t regions;       /* region_t */
} parameter_t;

static int read_region(const void *context, PyObject *item, size_t Py_UNUSED(index),
                       void *made)
{
    const uint32_t ndim = *(const uint32_t *)context;
    region_t *region = made;
    PyObject *start;
    PyObject *extent;
    PyObject *local;

    region->box = wsync_box_whole(0, NULL);
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "a region is (start, extent, local start), not %R",
                     item);
        return -1;
    }
    if (!PyArg_ParseTuple(item, "OOO;a region is (start, extent, local start)", &start,
                          &extent, &local) ||
        wsync_py_read_exactly(start, "region start", region->box.start, ndim) < 0 ||
        wsync_py_read_exactly(extent, "region extent", region->box.extent, ndim) < 0 ||
        wsync_py_read_exactly(local, "region local start", region->local, ndim) < 0) {
        return -1;
    }
    return 0;
}

static int read_map(PyObject *self, PyObject *item, const parameter_t *parameter,
                    wsync_tensor_t *tensor, wsync_map_t *map)
{
    PyObject *name;
    const char *dtype;
    PyObject *parts[5]; /* shape, start, source start, extent, axes */
    PyObject *steps = NULL;
    int64_t axes[WSYNC_MAX_NDIM];
    long long group;

    *tensor = (wsync_tensor_t){0};
    *map = (wsync_map_t){.target = wsync_box_whole(0, NULL)};
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "a map is a tuple, not %R", item);
        return -1;
    }
    if (!PyArg_ParseTuple(item,
                          "OsOOOOOL|ffO;a map is (name, dtype, shape, start, source start, "
                          "extent, axes, group, scale, offset, steps)",
                          &name, &dtype, &parts[0], &parts[1], &parts[2], &parts[3],
                          &parts[4], &group, &map->affine.scale, &map->affine.offset,
                          &steps) ||
        read_tensor(self, name, parameter->dtype[0] != '\0' ? parameter->dtype : dtype,
                    parts[0], group, tensor) < 0 ||
        wsync_py_read_exactly(parts[1], "map start", map->target.start, tensor->ndim) < 0 ||
        wsync_py_read_exactly(parts[2], "map source start", map->source_start,
                              parameter->ndim) < 0 ||
        wsync_py_read_exactly(parts[3], "map extent", map->target.extent, tensor->ndim) <
            0 ||
        wsync_py_read_exactly(parts[4], "map axes", axes, tensor->ndim) < 0 ||
        read_steps(steps, map->step, tensor->ndim) < 0) {
        return -1;
    }
    map->target_ndim = (uint8_t)tensor->ndim;
    map->source_ndim = (uint8_t)parameter->ndim;
    for (uint32_t i = 0; i < tensor->ndim; i++) {
        if (axes[i] < -1 || axes[i] >= (int64_t)parameter->ndim) {
            PyErr_Format(
                PyExc_ValueError,
                "%s: dim %u cannot come from axis %lld of a parameter with %u dimensions",
                tensor->name, i, (long long)axes[i], parameter->ndim);
            return -1;
        }
        map->axis[i] = (int8_t)axes[i];
    }
    return 0;
}

/* Where a region lies, in bytes of `item_nbytes` elements. */
static wsync_status_t place_region(const parameter_t *parameter, const region_t *region,
                                   size_t item_nbytes, wsync_shard_t *shard,
                                   wsync_error_t *err)
{
    int64_t offset = 0;

    shard->rank = parameter->rank;
    shard->buffer = parameter->buffer;
    shard->box = region->box;
    for (uint32_t i = 0; i < parameter->ndim; i++) {
        int64_t step;

        if (region->local[i] < 0 ||
            __builtin_mul_overflow(parameter->stride[i], (int64_t)item_nbytes,
                                   &shard->stride[i]) ||
            __builtin_mul_overflow(region->local[i], shard->stride[i], &step) ||
            __builtin_add_overflow(offset, step, &offset)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                              "axis %u: local start %lld with stride %lld is negative or "
                              "exceeds 64 bits",
                              i, (long long)region->local[i],
                              (long long)parameter->stride[i]);
        }
    }
    shard->offset = (uint64_t)offset;
    return WSYNC_OK;
}

/* Composes all regions with one map; adds the number of elements to *total. */
static wsync_status_t compose(wsync_layout_builder_t *builder, const parameter_t *parameter,
                              const wsync_tensor_t *tensor, const wsync_map_t *map,
                              uint64_t *total, wsync_error_t *err)
{
    const region_t *regions = parameter->regions.items;
    wsync_shard_t shard = {0};
    wsync_status_t status =
        wsync_layout_builder_tensor(builder, tensor, &shard.tensor, err);

    if (status == WSYNC_OK) {
        status =
            wsync_layout_builder_origin(builder, parameter->origin, &shard.origin, err);
    }
    for (size_t i = 0; i < parameter->regions.count && status == WSYNC_OK; i++) {
        uint64_t added = 0;

        status = place_region(parameter, &regions[i], wsync_dtype_nbytes(tensor->dtype),
                              &shard, err);
        if (status == WSYNC_OK) {
            status = wsync_layout_builder_compose(builder, &shard, map, &added, err);
        }
        *total += added;
    }
    return status;
}

static int add_maps(PyObject *self, const parameter_t *parameter, PyObject *maps,
                    uint64_t *total)
{
    const Py_ssize_t count = PyTuple_Size(maps);

    for (Py_ssize_t i = 0; i < count; i++) {
        wsync_tensor_t tensor;
        wsync_map_t map;
        wsync_layout_builder_t *builder;
        wsync_error_t err = {0};

        if (read_map(self, PyTuple_GetItem(maps, i), parameter, &tensor, &map) < 0) {
            return -1;
        }
        builder = get_builder(self);
        if (builder == NULL) {
            return -1;
        }
        if (compose(builder, parameter, &tensor, &map, total, &err) != WSYNC_OK) {
            const wsync_error_t cause = err;

            (void)wsync_py_fail(wsync_py_state_of(self), cause.status, cause.origin,
                                "%.256s: %.500s", parameter->origin, cause.message);
            return -1;
        }
    }
    return 0;
}

static PyObject *builder_add_parameter(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"origin",  "buffer", "dtype", "strides",
                               "regions", "maps",   NULL};
    parameter_t parameter = {.rank = ((BuilderObject *)self)->rank};
    PyObject *origin;
    PyObject *strides;
    PyObject *regions;
    PyObject *maps_argument;
    PyObject *maps = NULL;
    PyObject *result = NULL;
    long long buffer;
    uint64_t total = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLsOOO:add_parameter", keywords,
                                     &origin, &buffer, &parameter.dtype, &strides, &regions,
                                     &maps_argument) ||
        (parameter.origin = read_text(self, origin, "origin")) == NULL ||
        wsync_py_read_u32(buffer, "buffer", &parameter.buffer) < 0 ||
        wsync_py_read_int64s(strides, "strides", parameter.stride, &parameter.ndim) < 0 ||
        wsync_py_items_init(&parameter.regions, regions, sizeof(region_t), read_region,
                            &parameter.ndim) < 0) {
        return NULL;
    }
    maps = PySequence_Tuple(maps_argument);
    if (maps != NULL && add_maps(self, &parameter, maps, &total) == 0) {
        result = PyLong_FromUnsignedLongLong(total);
    }
    wsync_py_items_fini(&parameter.regions);
    Py_XDECREF(maps);
    return result;
}

static PyObject *builder_build(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    BuilderObject *self = (BuilderObject *)object;
    wsync_layout_builder_t *builder = get_builder(object);
    wsync_layout_t *layout = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (builder == NULL) {
        return NULL;
    }
    self->builder = NULL; /* others must not see it half moved */
    Py_BEGIN_ALLOW_THREADS
        status = wsync_layout_builder_finish(builder, &layout, &err);
    Py_END_ALLOW_THREADS
    self->builder = builder;
    return status == WSYNC_OK ? wsync_py_layout_new(wsync_py_state_of(object), layout)
                              : raise_for(object, &err);
}

static PyMethodDef builder_methods[] = {
    {"add_tensors", WSYNC_PY_KEYWORDS(builder_add_tensors),
     "add_tensors($self, names, tensors, groups=None)\n--\n\n"},
    {"add_tensor", WSYNC_PY_KEYWORDS(builder_add_tensor),
     "add_tensor($self, name, dtype, shape, group=0)\n--\n\n"},
    {"add_shard", WSYNC_PY_KEYWORDS(builder_add_shard),
     "add_shard($self, name, dtype, shape, start, extent, buffer, offset, strides,\n       "
     "   origin='', group=0, steps=None)\n--\n\n"},
    {"add_parameter", WSYNC_PY_KEYWORDS(builder_add_parameter),
     "add_parameter($self, origin, buffer, dtype, strides, regions, maps)\n--\n\n"},
    {"build", builder_build, METH_NOARGS, "build($self)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot builder_slots[] = {
    {Py_tp_doc, "LayoutBuilder(rank=0)\n--\n\n"},
    {Py_tp_new, builder_new},
    {Py_tp_dealloc, builder_dealloc},
    {Py_tp_methods, builder_methods},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_LayoutBuilder = {
    "wsync._core.LayoutBuilder", sizeof(BuilderObject), 0, builder_slots, NULL, NULL};
