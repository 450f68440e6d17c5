/* SPDX-License-Identifier: Apache-2.0
 * Records: tuples with named fields, which methods return.  wsync/_core.pyi says what the
 * fields are. */
#include "python/module.h"

static PyStructSequence_Field shard_fields[] = {
    {"rank", NULL},   {"buffer", NULL},  {"offset", NULL}, {"start", NULL},
    {"extent", NULL}, {"strides", NULL}, {"origin", NULL}, {"affine", NULL},
    {"steps", NULL},  {NULL, NULL},
};
static PyStructSequence_Field tensor_info_fields[] = {
    {"name", NULL}, {"dtype", NULL}, {"shape", NULL}, {"group", NULL}, {NULL, NULL},
};
static PyStructSequence_Field slot_fields[] = {
    {"offset", NULL},
    {"nbytes", NULL},
    {"wait_round", NULL},
    {NULL, NULL},
};
static PyStructSequence_Field message_fields[] = {
    {"source", NULL},      {"peers", NULL},  {"send_offset", NULL},
    {"recv_offset", NULL}, {"nbytes", NULL}, {NULL, NULL},
};

int wsync_py_add_records(PyObject *module)
{
    ModuleState *state = wsync_py_state(module);
    const struct {
        PyStructSequence_Desc desc;
        PyTypeObject **slot;
    } records[] = {
        {{"wsync._core.Shard", "A box of a tensor and where it lies.", shard_fields, 7},
         &state->record_Shard},
        {{"wsync._core.TensorInfo", "A tensor of a layout.", tensor_info_fields, 4},
         &state->record_TensorInfo},
        {{"wsync._core.Slot", "Where a round lies in a ring.", slot_fields, 3},
         &state->record_Slot},
        {{"wsync._core.Message", "Equal bytes from one rank to others.", message_fields, 5},
         &state->record_Message},
    };

    for (size_t i = 0; i < sizeof(records) / sizeof(records[0]); i++) {
        PyStructSequence_Desc desc = records[i].desc;

        *records[i].slot = PyStructSequence_NewType(&desc);
        if (*records[i].slot == NULL || PyModule_AddType(module, *records[i].slot) < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *wsync_py_record(PyTypeObject *type, PyObject *values)
{
    PyObject *record = values != NULL ? PyStructSequence_New(type) : NULL;

    for (Py_ssize_t i = 0; record != NULL && i < PyTuple_Size(values); i++) {
        PyStructSequence_SetItem(record, i, Py_NewRef(PyTuple_GetItem(values, i)));
    }
    Py_XDECREF(values);
    return record;
}
