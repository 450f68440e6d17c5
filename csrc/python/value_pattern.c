/* SPDX-License-Identifier: Apache-2.0
 * Pattern: whether a value is still what it was, down to what its parts hold.  An update
 * asks it of a whole torch module, with which Python takes longer than the copies do. */
#include <stdlib.h>
#include <string.h>

#include "python/convert.h"

/* What a row asks of a value, and what its inner rows are about:
 *   atom       it is `what`, or equal to it and of the same type
 *   type       its type is `what`
 *   other      it is no instance of the type `what`
 *   at         it lies at the address `what`
 *   held       the dict of the pair `what` holds it at the pair's key
 *   once       nothing: its inner rows are asked once, however often the value is met
 *   keep       nothing: it becomes part of the answer
 *   absent     it has no attribute `what`
 *   lacks      it does not contain `what`
 *   own        it has a dict of its own attributes: of that
 *   attribute  it has the attribute `what`: of that
 *   item       it is a dict with the key `what`: of what is there
 *   call       it has the method `what`: of what that gives
 *   apply      `what` can be called with it: of what that gives
 *   elements   as many elements as there are inner rows, in this order: one of each
 *   items      a mapping with as many keys as there are inner rows, which are those of the
 *              tuple `what`, in its order: one of what is at each
 * The inner rows of the first nine are about the value itself. */
#define OPERATION_MAP(X)      \
    X(ATOM, "atom")           \
    X(TYPE, "type")           \
    X(OTHER, "other")         \
    X(AT, "at")               \
    X(HELD, "held")           \
    X(ONCE, "once")           \
    X(KEEP, "keep")           \
    X(ABSENT, "absent")       \
    X(LACKS, "lacks")         \
    X(OWN, "own")             \
    X(ATTRIBUTE, "attribute") \
    X(ITEM, "item")           \
    X(CALL, "call")           \
    X(APPLY, "apply")         \
    X(ELEMENTS, "elements")   \
    X(ITEMS, "items")

#define ENUM(name, text) name,
typedef enum operation { OPERATION_MAP(ENUM) OPERATIONS } operation_t;
#undef ENUM
#define TEXT(name, text) text,
static const char *const operation_names[] = {OPERATION_MAP(TEXT)};
#undef TEXT

/* Rows in rows: matching calls itself as often, on the caller's stack. */
enum { MOST_NESTED = 4096 };

/* The value that the inner rows of `once` were last true of, and in which match. */
typedef struct once {
    const void *met;
    uint64_t when;
} once_t;

typedef struct row {
    operation_t operation;
    union {
        PyObject *what;      /* borrowed */
        const void *address; /* at */
        once_t *once;
    };
    struct row **inner;
    Py_ssize_t count;
} row_t;

/* The values that the last match met, in order.  Most are met again, and what the processor
 * is told of early it need not wait for: of a large module hardly any is in its caches.
 * They may be gone: these are addresses, and nothing is read there. */
typedef struct trace {
    const void **values; /* owned */
    size_t count;
} trace_t;

typedef struct PatternObject {
    PyObject_HEAD
    wsync_py_items_t rows; /* an inner row comes before those that it is an inner row of */
    row_t **inner;         /* owned, of all rows */
    once_t *once;          /* owned, of all rows that are `once` */
    uint64_t matches;
    trace_t trace;
} PatternObject;

typedef struct match {
    uint64_t number;
    PyObject *kept; /* list */
    trace_t *trace;
    size_t met;
} match_t;

enum { AHEAD = 24, ROWS_AHEAD = 16, INNER_AHEAD = 32, TRACE_MIN = 64 };

/* Notes a value before it is looked at. */
static void meet(match_t *match, const void *value)
{
    trace_t *trace = match->trace;

    if (match->met == trace->count) {
        const size_t count = match->met < TRACE_MIN ? TRACE_MIN : 2 * match->met;
        const void **values =
            (const void **)realloc((void *)trace->values, count * sizeof(*values));

        if (values == NULL) {
            return;
        }
        memset((void *)(values + trace->count), 0,
               (count - trace->count) * sizeof(*values));
        *trace = (trace_t){values, count};
    }
    if (match->met + AHEAD < trace->count) {
        __builtin_prefetch(trace->values[match->met + AHEAD]);
    }
    trace->values[match->met++] = value;
}

/* A hint, also beyond the end of an array, where no pointer may be formed. */
static void fetch(const void *from, size_t ahead)
{
    __builtin_prefetch((const void *)((uintptr_t)from + ahead)); /* NOLINT */
}

/* Rows lie in the order in which modules are asked, two of them in three cache lines. */
static void expect_rows(const row_t *row)
{
    fetch(row, ROWS_AHEAD * sizeof(*row));
    fetch(row, (ROWS_AHEAD + 2) * sizeof(*row));
    fetch((const void *)row->inner, INNER_AHEAD * sizeof(*row->inner));
}

/* Whether a row is true of a value; -1 with an exception. */
static int match_row(match_t *match, row_t *row, PyObject *value);

static int match_elements(match_t *match, const row_t *row, PyObject *value)
{
    PyObject *elements = PySequence_Tuple(value);
    int same = elements != NULL ? PyTuple_Size(elements) == row->count : wsync_py_refused();

    for (Py_ssize_t i = 0; same > 0 && i < row->count; i++) {
        same = match_row(match, row->inner[i], PyTuple_GetItem(elements, i));
    }
    Py_XDECREF(elements);
    return same;
}

static int is_atom(PyObject *value, PyObject *atom)
{
    if (value == atom || !Py_IS_TYPE(value, Py_TYPE(atom))) {
        return value == atom;
    }
    return PyObject_RichCompareBool(value, atom, Py_EQ);
}

/* What a row asks of the value itself; not 1 with an exception. */
static int ask(match_t *match, const row_t *row, PyObject *value)
{
    switch (row->operation) {
    case ATOM:
        return is_atom(value, row->what);
    case TYPE:
        return (PyObject *)Py_TYPE(value) == row->what;
    case OTHER:
        return !PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)row->what);
    case AT:
        expect_rows(row);
        return row->address == value;
    case HELD:
        return PyDict_GetItemWithError(PyTuple_GetItem(row->what, 0),
                                       PyTuple_GetItem(row->what, 1)) == value;
    case KEEP:
        return PyList_Append(match->kept, value) == 0;
    case LACKS:
        return PySequence_Contains(value, row->what) == 0;
    default:
        return 1;
    }
}

/* Whatever runs meanwhile may change the dict: nothing is borrowed from it then.  Most of
 * what a module holds is `other`, of a few types, and is not even written to here. */
static int match_dict(match_t *match, const row_t *row, PyObject *dict)
{
    PyTypeObject *known = NULL; /* one that the row `other` was true of */
    const row_t *other = NULL;
    PyObject *key = NULL;
    PyObject *item = NULL;
    Py_ssize_t place = 0;
    Py_ssize_t i = 0;
    int same = PyDict_Size(dict) == row->count;

    while (same > 0 && i < row->count && PyDict_Next(dict, &place, &key, &item)) {
        row_t *inner = row->inner[i];

        meet(match, item);
        if (inner->operation == OTHER && key == PyTuple_GetItem(row->what, i)) {
            same = (inner == other && Py_IS_TYPE(item, known)) || ask(match, inner, item);
            other = inner;
            known = Py_TYPE(item);
        } else {
            Py_INCREF(key);
            Py_INCREF(item);
            same = is_atom(key, PyTuple_GetItem(row->what, i));
            same = same > 0 ? match_row(match, inner, item) : same;
            Py_DECREF(key);
            Py_DECREF(item);
            other = NULL; /* types may have become others */
        }
        i++;
    }
    return same > 0 ? i == row->count : wsync_py_refused();
}

static int match_items(match_t *match, const row_t *row, PyObject *value)
{
    PyObject *copy;
    int same;

    if (PyDict_CheckExact(value)) {
        return match_dict(match, row, value);
    }
    copy = PyDict_New(); /* others may have another order than their memory has */
    same = copy != NULL && PyDict_Update(copy, value) == 0 ? match_dict(match, row, copy)
                                                           : wsync_py_refused();
    Py_XDECREF(copy);
    return same;
}

/* What the inner rows are about where that is not the value itself: new; NULL if it is not
 * there. */
static PyObject *derive(const row_t *row, PyObject *value)
{
    switch (row->operation) {
    case OWN:
        return PyObject_GenericGetDict(value, NULL);
    case ATTRIBUTE:
    case ABSENT:
        return PyObject_GetAttr(value, row->what);
    case ITEM:
        return PyDict_Check(value) ? Py_XNewRef(PyDict_GetItemWithError(value, row->what))
                                   : NULL;
    case CALL:
        return PyObject_CallMethodObjArgs(value, row->what, NULL);
    default:
        return PyObject_CallFunctionObjArgs(row->what, value, NULL);
    }
}

static int match_inner(match_t *match, const row_t *row, PyObject *value)
{
    int same = 1;

    for (Py_ssize_t i = 0; same > 0 && i < row->count; i++) {
        same = match_row(match, row->inner[i], value);
    }
    return same;
}

static int match_row(match_t *match, row_t *row, PyObject *value)
{
    PyObject *derived;
    int same;

    switch (row->operation) {
    case ELEMENTS:
        return match_elements(match, row, value);
    case ITEMS:
        return match_items(match, row, value);
    case ABSENT:
        derived = derive(row, value);
        same = derived == NULL && (PyErr_ExceptionMatches(PyExc_AttributeError) ||
                                   PyErr_ExceptionMatches(PyExc_ValueError));
        Py_XDECREF(derived);
        if (same > 0) {
            PyErr_Clear(); /* ValueError: of a cell that nothing has been put into */
        }
        return same > 0 ? same : wsync_py_refused();
    case OWN:
    case ATTRIBUTE:
    case ITEM:
    case CALL:
    case APPLY:
        derived = derive(row, value);
        meet(match, derived);
        same = derived != NULL ? match_inner(match, row, derived) : wsync_py_refused();
        Py_XDECREF(derived);
        return same;
    case ONCE:
        if (row->once->met == value && row->once->when == match->number) {
            return 1;
        }
        same = match_inner(match, row, value);
        if (same > 0) {
            *row->once = (once_t){value, match->number};
        }
        return same;
    default:
        return ask(match, row, value) > 0 ? match_inner(match, row, value)
                                          : wsync_py_refused();
    }
}

/* --- the type ------------------------------------------------------------------------- */

static int read_row(const void *Py_UNUSED(context), PyObject *object, size_t index,
                    void *item)
{
    row_t *row = item;
    const char *name = NULL;
    PyObject *inner = NULL;

    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError, "row %zu is no tuple: %R", index, object);
        return -1;
    }
    if (!PyArg_ParseTuple(object, "sOO!:Pattern", &name, &row->what, &PyTuple_Type,
                          &inner)) {
        return -1;
    }
    while (row->operation < OPERATIONS &&
           strcmp(name, operation_names[row->operation]) != 0) {
        row->operation++;
    }
    row->count = PyTuple_Size(inner);
    if (row->operation == OPERATIONS ||
        (row->operation == OTHER && !PyType_Check(row->what)) ||
        (row->operation == HELD &&
         (!PyTuple_Check(row->what) || PyTuple_Size(row->what) != 2 ||
          !PyDict_Check(PyTuple_GetItem(row->what, 0)))) ||
        (row->operation == ITEMS &&
         (!PyTuple_Check(row->what) || PyTuple_Size(row->what) != row->count))) {
        PyErr_Format(PyExc_ValueError, "row %zu: no operation %s of %R", index, name,
                     row->what);
        return -1;
    }
    if (row->operation == AT) {
        row->address = PyLong_AsVoidPtr(row->what);
        return PyErr_Occurred() != NULL ? -1 : 0;
    }
    return 0;
}

/* Finds the inner rows of all rows. */
static int link_rows(PatternObject *self)
{
    row_t *rows = self->rows.items;
    uint16_t *depth = calloc(self->rows.count + 1, sizeof(*depth));
    once_t *once;
    size_t count = 0;
    size_t once_count = 0;

    for (size_t i = 0; i < self->rows.count; i++) {
        count += (size_t)rows[i].count;
        once_count += rows[i].operation == ONCE;
    }
    self->inner = (row_t **)calloc(count + 1, sizeof(*self->inner));
    once = self->once = calloc(once_count + 1, sizeof(*once));
    if (self->inner == NULL || once == NULL || depth == NULL) {
        free(depth);
        (void)PyErr_NoMemory();
        return -1;
    }
    count = 0;
    for (size_t i = 0; i < self->rows.count; i++) {
        PyObject *numbers =
            PyTuple_GetItem(PyTuple_GetItem(self->rows.tuple, (Py_ssize_t)i), 2);

        if (rows[i].operation == ONCE) {
            rows[i].once = once++;
        }
        rows[i].inner = self->inner + count;
        count += (size_t)rows[i].count;
        for (Py_ssize_t k = 0; k < rows[i].count; k++) {
            const size_t number = PyLong_AsSize_t(PyTuple_GetItem(numbers, k));

            if (PyErr_Occurred() != NULL || number >= i || depth[number] == MOST_NESTED) {
                PyErr_Format(
                    PyExc_ValueError,
                    "row %zu: inner row %R does not come before, or has %d rows in "
                    "each other",
                    i, PyTuple_GetItem(numbers, k), MOST_NESTED);
                free(depth);
                return -1;
            }
            rows[i].inner[k] = &rows[number];
            if (depth[number] >= depth[i]) {
                depth[i] = (uint16_t)(depth[number] + 1);
            }
        }
    }
    free(depth);
    return 0;
}

static PyObject *pattern_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rows", NULL};
    PyObject *rows;
    PatternObject *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Pattern", names, &rows)) {
        return NULL;
    }
    self = (PatternObject *)wsync_py_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    if (wsync_py_items_init(&self->rows, rows, sizeof(row_t), read_row, NULL) < 0 ||
        link_rows(self) < 0) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static int pattern_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((PatternObject *)object)->rows.tuple);
    return 0;
}

static int pattern_clear(PyObject *object)
{
    wsync_py_items_t rows = ((PatternObject *)object)->rows;

    ((PatternObject *)object)->rows = (wsync_py_items_t){0};
    wsync_py_items_fini(&rows);
    return 0;
}

static void pattern_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    (void)pattern_clear(object);
    free((void *)((PatternObject *)object)->inner);
    free(((PatternObject *)object)->once);
    free((void *)((PatternObject *)object)->trace.values);
    wsync_py_free(object);
}

static PyObject *pattern_match(PyObject *object, PyObject *value)
{
    PatternObject *self = (PatternObject *)object;
    match_t match = {
        .number = ++self->matches, .kept = PyList_New(0), .trace = &self->trace};
    row_t *rows = self->rows.items;
    const int collects = PyGC_Disable(); /* see describe_undisturbed() */
    int same = -1;

    if (match.kept != NULL) {
        same = self->rows.count > 0 ? match_row(&match, &rows[self->rows.count - 1], value)
                                    : 1;
    }
    if (collects) {
        (void)PyGC_Enable();
    }
    if (same > 0) {
        return match.kept;
    }
    Py_XDECREF(match.kept);
    return same == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef pattern_methods[] = {
    {"match", pattern_match, METH_O,
     "match($self, value, /)\n--\n\n"
     "What `keep` met, in order, if the last row is true of the value; else None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pattern_slots[] = {
    {Py_tp_doc,
     "Pattern(rows)\n--\n\n"
     "What a value is, as rows (operation, what, numbers of inner rows, which come "
     "before).\n"
     "See csrc/python/value_pattern.c for the operations."},
    {Py_tp_new, pattern_new},
    {Py_tp_dealloc, pattern_dealloc},
    {Py_tp_traverse, pattern_traverse},
    {Py_tp_clear, pattern_clear},
    {Py_tp_methods, pattern_methods},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Pattern = {"wsync._core.Pattern",
                                               sizeof(PatternObject),
                                               Py_TPFLAGS_HAVE_GC,
                                               pattern_slots,
                                               NULL,
                                               NULL};
