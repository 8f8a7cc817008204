// Launches of one compiled kernel, as a Python function; see ubatch/kernels/quick_launch.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

// A kernel has `MOST` parameters at most, and keeps `MOST_MAPS`. `TRITONS`: this launch is for Triton.
enum { WARP = 32, MAP_BYTES = 128, MAP_ALIGNMENT = 64, MOST_SIDES = 5, TRITONS = -1 };

// `cuLaunchKernel`: 0 is success.
typedef int Driver(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **params, void **extra);

typedef struct {
    Driver *driver;
    void *function;
    unsigned threads, shared;
    PyObject *maps, *encode;  // encoded tensor maps by what they are of; (place, descriptor) -> another one
    Py_ssize_t count;
    char kinds[];  // of the arguments: see `_KINDS` in quick_launch.py
} Kernel;

typedef struct {
    int count;
    uint64_t values[MOST];
    void *params[MOST];  // what the driver reads: addresses of values, or of a tensor map
    int held_count;
    PyObject *held[MOST];  // maps, which another thread may drop from `Kernel.maps` meanwhile
} Params;

static PyObject *DATA_PTR, *BASE, *SHAPE, *STRIDES;

static int add(Params *to, PyObject *number) {
    if (to->count == MOST) return PyErr_SetString(PyExc_ValueError, "a kernel has too many parameters."), 0;
    // Of a shorter parameter the driver reads the first bytes only.
    to->values[to->count] = PyLong_AsUnsignedLongLongMask(number);
    to->params[to->count] = &to->values[to->count];
    to->count++;
    return !PyErr_Occurred();
}

static int add_float(Params *to, PyObject *number) {
    const float value = (float)PyFloat_AsDouble(number);
    if (PyErr_Occurred() || !add(to, Py_False)) return 0;
    memcpy(&to->values[to->count - 1], &value, sizeof value);
    return 1;
}

// Where the encoded map lies in the first of these objects, Triton's, which ends with it; 0 if that is of another kind.
static void *encoded(PyObject *map) {
    if (!PyTuple_Check(map) || !PyTuple_GET_SIZE(map)) return 0;
    PyObject *object = PyTuple_GET_ITEM(map, 0);
    char *at = (char *)object + Py_TYPE(object)->tp_basicsize - MAP_BYTES;
    return at > (char *)object && (uintptr_t)at % MAP_ALIGNMENT == 0 ? at : 0;
}

static int put_sizes(int64_t *to, PyObject *object, PyObject *name) {
    PyObject *sizes = PyObject_GetAttr(object, name);
    int good = sizes && PyList_Check(sizes) && PyList_GET_SIZE(sizes) <= MOST_SIDES;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(sizes); i++) {
        to[i] = PyLong_AsLongLong(PyList_GET_ITEM(sizes, i));
        good = !PyErr_Occurred();
    }
    Py_XDECREF(sizes);
    return good;
}

// The tensor map of a descriptor, made or found by its place among the arguments, address, sizes and strides; owned.
static PyObject *map_of(const Kernel *kernel, Py_ssize_t place, PyObject *descriptor) {
    struct {
        int64_t place, sizes[MOST_SIDES], strides[MOST_SIDES];
        uint64_t address;
    } of = {place, {0}, {0}, 0};
    PyObject *base = PyObject_GetAttr(descriptor, BASE);
    PyObject *address = base ? PyObject_CallMethodNoArgs(base, DATA_PTR) : 0;
    if (address) of.address = PyLong_AsUnsignedLongLong(address);
    const int good = address && !PyErr_Occurred() && put_sizes(of.sizes, descriptor, SHAPE) &&
                     put_sizes(of.strides, descriptor, STRIDES);
    Py_XDECREF(base), Py_XDECREF(address);
    PyObject *key = good ? PyBytes_FromStringAndSize((char *)&of, sizeof of) : 0;
    if (!key) return 0;
    PyObject *map = Py_XNewRef(PyDict_GetItemWithError(kernel->maps, key));
    if (!map && !PyErr_Occurred()) {
        map = PyObject_CallFunction(kernel->encode, "nO", place, descriptor);
        if (PyDict_GET_SIZE(kernel->maps) >= MOST_MAPS) PyDict_Clear(kernel->maps);  // of memory that is long gone
        if (map && PyDict_SetItem(kernel->maps, key, map) < 0) Py_CLEAR(map);
    }
    Py_DECREF(key);
    return map;
}

// The encoded map, and the sizes and strides that Triton passes beside it.
static int add_map(Params *to, PyObject *map) {
    if (!add(to, Py_False)) return 0;
    to->params[to->count - 1] = encoded(map);
    for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(map); i++)
        if (!add(to, PyTuple_GET_ITEM(map, i))) return 0;
    return 1;
}

// 0 with an error, or without one if the launch is for Triton.
static int add_all(const Kernel *kernel, Params *to, PyObject *const *args) {
    for (Py_ssize_t i = 0; i < kernel->count; i++) {
        PyObject *map;
        switch (kernel->kinds[i]) {
            case 'p':
                if (!PyLong_Check(args[i]) || !add(to, args[i])) return 0;
                break;
            case 'i':
                if (!add(to, args[i])) return 0;
                break;
            case 'f':
                if (!add_float(to, args[i])) return 0;
                break;
            case 'm':
                if (!(map = map_of(kernel, i, args[i]))) return 0;
                to->held[to->held_count++] = map;
                if (!encoded(map) || !add_map(to, map)) return 0;
        }
    }
    return add(to, Py_False) && add(to, Py_False);  // the global scratch memory, and the profiler's: none
}

// (x, y, z, stream, *arguments) -> 0; or `TRITONS`, or the driver's error, which may be that of earlier work. Then nothing
// was launched.
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    const Kernel *kernel = PyCapsule_GetPointer(self, 0);
    if (!kernel) return 0;
    if (given != kernel->count + 4) return PyErr_Format(PyExc_TypeError, "%zd arguments were given.", given);
    long grid[3];
    for (int i = 0; i < 3; i++) grid[i] = PyLong_AsLong(args[i]);
    void *stream = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred()) return 0;
    for (int i = 0; i < 3; i++)
        if (grid[i] < 0 || grid[i] > INT32_MAX) return PyLong_FromLong(TRITONS);
    Params params;
    params.count = params.held_count = 0;
    int status = TRITONS;
    if (add_all(kernel, &params, args + 4)) {
        status = 0;
        if (grid[0] && grid[1] && grid[2]) {
            Py_BEGIN_ALLOW_THREADS;  // the driver waits if too much is queued
            status = kernel->driver(kernel->function, (unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2],
                                    kernel->threads, 1, 1, kernel->shared, stream, params.params, 0);
            Py_END_ALLOW_THREADS;
        }
    }
    for (int i = 0; i < params.held_count; i++) Py_DECREF(params.held[i]);
    return PyErr_Occurred() ? 0 : PyLong_FromLong(status);
}

static PyMethodDef definition = {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, 0};

static void release(PyObject *capsule) {
    Kernel *kernel = PyCapsule_GetPointer(capsule, 0);
    Py_DECREF(kernel->maps), Py_DECREF(kernel->encode);
    PyMem_Free(kernel);
}

// (address of the driver's function, kernel, warps, bytes of shared memory, kinds, `Kernel.encode`) -> the function.
PyObject *launcher(PyObject *args) {
    unsigned long long driver, function;
    unsigned warps, shared;
    const char *kinds;
    Py_ssize_t count;
    PyObject *encode;
    if (!PyArg_ParseTuple(args, "KKIIy#O", &driver, &function, &warps, &shared, &kinds, &count, &encode)) return 0;
    PyObject **const texts[] = {&DATA_PTR, &BASE, &SHAPE, &STRIDES};
    const char *const words[] = {"data_ptr", "base", "shape", "strides"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!*texts[i] && !(*texts[i] = PyUnicode_InternFromString(words[i]))) return 0;
    PyObject *maps = PyDict_New();
    Kernel *kernel = maps ? PyMem_Malloc(sizeof *kernel + count) : 0;
    if (!kernel) {
        Py_XDECREF(maps);
        return PyErr_NoMemory();
    }
    *kernel = (Kernel){(Driver *)(uintptr_t)driver, (void *)(uintptr_t)function, warps * WARP, shared, maps, encode, count};
    Py_INCREF(encode);
    memcpy(kernel->kinds, kinds, count);
    PyObject *self = PyCapsule_New(kernel, 0, release);
    if (!self) return 0;
    PyObject *made = PyCFunction_New(&definition, self);
    Py_DECREF(self);
    return made;
}
