from megaclass.hvd.basics import _Basics as HorovodBasics
