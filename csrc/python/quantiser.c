/* SPDX-License-Identifier: Apache-2.0
 * Quantiser: what of a layout one rank quantises. */
#include "python/quantiser.h"

#include <stdbool.h>

#include "python/convert.h"
#include "python/layout.h"

/* Reads a rule, as wsync/_core.pyi has it. */
static int read_rule(const void *context, PyObject *item, size_t index, void *made)
{
    ModuleState *state = *(ModuleState *const *)context;
    wsync_quantise_rule_t *rule = made;
    const char *kind = NULL;
    int reciprocal = 0;
    wsync_error_t err = {0};

    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "rule %zu: expected a tuple, not %R", index, item);
        return -1;
    }
    if (!PyArg_ParseTuple(item, "sspO&O&sszzO&O&", &rule->tensor, &kind, &reciprocal,
                          wsync_py_convert_u32, &rule->method.block_rows,
                          wsync_py_convert_u32, &rule->method.block_cols, &rule->codes,
                          &rule->scales, &rule->second, &rule->shape, wsync_py_convert_u32,
                          &rule->share, wsync_py_convert_u32, &rule->group)) {
        return -1;
    }
    rule->method.reciprocal = reciprocal != 0;
    if (wsync_quantise_kind_from_name(kind, &rule->method.kind, &err) != WSYNC_OK) {
        (void)wsync_py_raise(state, &err);
        return -1;
    }
    return 0;
}

static PyObject *quantiser_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"layout", "rank", "buffers", "rules", NULL};
    ModuleState *state = wsync_py_type_state(type);
    PyObject *layout;
    PyObject *rules;
    uint32_t rank;
    uint32_t buffers;
    wsync_py_items_t items;
    QuantiserObject *self;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&O&O:Quantiser", keywords,
                                     state->type_Layout, &layout, wsync_py_convert_u32,
                                     &rank, wsync_py_convert_u32, &buffers, &rules) ||
        wsync_py_items_init(&items, rules, sizeof(wsync_quantise_rule_t), read_rule,
                            (const void *)&state) < 0) {
        return NULL;
    }
    self = (QuantiserObject *)wsync_py_alloc(type);
    if (self == NULL) {
        wsync_py_items_fini(&items);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_quantiser_create(((LayoutObject *)layout)->layout, rank, buffers,
                                        items.items, items.count, &self->quantiser, &err);
    Py_END_ALLOW_THREADS
    wsync_py_items_fini(&items);
    if (status != WSYNC_OK) {
        (void)wsync_py_raise(state, &err);
    } else {
        self->layout =
            wsync_py_layout_new(state, wsync_quantiser_take_layout(self->quantiser));
    }
    if (self->layout == NULL) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static void quantiser_dealloc(PyObject *self)
{
    Py_XDECREF(((QuantiserObject *)self)->layout);
    wsync_quantiser_destroy(((QuantiserObject *)self)->quantiser);
    wsync_py_free(self);
}

static PyObject *quantiser_layout(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((QuantiserObject *)self)->layout);
}

static PyObject *quantiser_constants(PyObject *self, void *Py_UNUSED(closure))
{
    size_t nbytes;
    const void *data =
        wsync_quantiser_constants(((QuantiserObject *)self)->quantiser, &nbytes);

    return PyBytes_FromStringAndSize(data, (Py_ssize_t)nbytes);
}

/* The ends of the image's buffers. */
static PyObject *quantiser_ends(PyObject *self, void *Py_UNUSED(closure))
{
    const wsync_quantiser_t *quantiser = ((QuantiserObject *)self)->quantiser;
    size_t count;
    const uint64_t *starts = wsync_quantiser_starts(quantiser, &count);
    PyObject *ends = PyList_New((Py_ssize_t)count);

    for (size_t i = 0; i < count; i++) {
        const uint64_t end =
            i + 1 < count ? starts[i + 1] : wsync_quantiser_image_nbytes(quantiser);

        wsync_py_list_put(&ends, i, PyLong_FromUnsignedLongLong(end));
    }
    return ends;
}

static PyObject *quantiser_stats(PyObject *self, void *Py_UNUSED(closure))
{
    const wsync_quantiser_stats_t stats =
        wsync_quantiser_stats(((QuantiserObject *)self)->quantiser);

    return Py_BuildValue("{sKsK}", "quantised_nbytes",
                         (unsigned long long)stats.quantised_nbytes, "repeated_nbytes",
                         (unsigned long long)stats.repeated_nbytes);
}

WSYNC_PY_NUMBER_GETTER(quantiser_image_nbytes,
                       wsync_quantiser_image_nbytes(((QuantiserObject *)self)->quantiser))
WSYNC_PY_NUMBER_GETTER(quantiser_amax_count,
                       wsync_quantiser_amax_count(((QuantiserObject *)self)->quantiser))

static PyGetSetDef quantiser_getset[] = {
    {"layout", quantiser_layout, NULL, NULL, NULL},
    {"ends", quantiser_ends, NULL, NULL, NULL},
    {"constants", quantiser_constants, NULL, NULL, NULL},
    {"image_nbytes", quantiser_image_nbytes, NULL, NULL, NULL},
    {"amax_count", quantiser_amax_count, NULL, NULL, NULL},
    {"stats", quantiser_stats, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot quantiser_slots[] = {
    {Py_tp_doc, "Quantiser(layout, rank, buffers, rules)\n--\n\n"},
    {Py_tp_new, quantiser_new},
    {Py_tp_dealloc, quantiser_dealloc},
    {Py_tp_getset, quantiser_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Quantiser = {
    "wsync._core.Quantiser", sizeof(QuantiserObject), 0, quantiser_slots, NULL, NULL};
